"""Make a plan from a config and an inventory: the machine and slots of each node of the run, with reasons.

All functions are pure. A launcher derives everything that it deploys from the plan, and `str(plan)` is the output of `swarmtrain plan`.
Ranks are not planned: the rendezvous assigns them for each world.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config, pipeline_layout
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.errors import PlanError
from swarmtrain.notifications.channel import ChannelType
from swarmtrain.planning.gpu_resolution import resolve_gpu_mode
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.node_selection import PlannedNode, format_count, list_usable_machines, select_nodes
from swarmtrain.planning.placement import FRESH_PLACEMENT, Placement
from swarmtrain.protocol import ROLE_NODE, ROLE_PROBE

_RUN_NAME_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
# Swarm limits config names to 64 characters; the longest name that contains the run's name is "<run>_config-<digest>".
MAX_RUN_NAME_LENGTH = 64 - len("_config-") - 10
_PROBE_SUFFIX = "-probe"
_DEBUG_LEVEL_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"
_DEFAULT_MASTER_PORT = 29500
# Ports of runs, below the ephemeral range. A run has one port each for the store, the coordinator and the probe, and one in reserve.
_FIRST_PORT, _PORTS_PER_RUN, _PORT_SETS = 20000, 4, 2500


@dataclass(frozen=True)
class Plan:
    """Plan of a run: which node runs on which machine, and why."""

    run: str
    config: Config
    cargo: Cargo
    nodes: tuple[PlannedNode, ...]
    """The nodes that the launcher creates: also missing ones if the launcher starts them as soon as their machines are available."""
    origin: str
    is_probe: bool = False
    """Whether the nodes run the doctor's probe instead of training."""
    step_time_seconds: float = 0.0
    """About how long a probe measures training steps, in seconds; 0: not at all."""
    coordinator_machine: Machine | None = None
    """Manager machine that must run the coordinator, because the nodes receive its address; None: any manager."""
    notes: tuple[str, ...] = ()
    """Decisions that do not follow from the config alone, with reasons, one line each."""
    missing_nodes: tuple[PlannedNode, ...] = ()
    """The nodes that cannot start now, because their machines are missing."""
    requested_node_count: int = 0
    """Number of nodes that the config, or `swarmtrain scale`, requests. The inventory may have fewer machines, but at least `min_nodes`."""

    @property
    def trains_built_in_model(self) -> bool:
        """Whether the ranks run the built-in trainer, for which the config's topology and batch sizes are."""
        return self.config.runner.module is None and self.cargo.calls_built_in_trainer

    @property
    def gpu_mode(self) -> GpuMode:
        """GPUs of the nodes' containers: as the config sets it, else as `build_plan` has resolved it."""
        return self.config.runner.swarm.gpu or GpuMode.none

    @property
    def role(self) -> str:
        """Role of swarmtrain.entrypoint that the nodes run: node or probe."""
        return ROLE_PROBE if self.is_probe else ROLE_NODE

    @property
    def master_port(self) -> int:
        """Port of the coordinator.

        If no port is configured, a run on the host network uses a port that is derived from the run's name.
        """
        runner = self.config.runner
        if runner.master_port is not None or not runner.is_on_host_network:
            return runner.master_port or _DEFAULT_MASTER_PORT
        return _FIRST_PORT + _PORTS_PER_RUN * (zlib.crc32(self.run.encode()) % _PORT_SETS)

    @property
    def min_nodes(self) -> int:
        return self.config.runner.node_range[0]

    @property
    def max_nodes(self) -> int:
        return self.config.runner.node_range[2]

    @property
    def available_nodes(self) -> tuple[PlannedNode, ...]:
        """The nodes that can start now."""
        return tuple(node for node in self.nodes if not node.missing_reason)

    @property
    def can_form_world(self) -> bool:
        """Whether enough nodes can start now to form a world."""
        return len(self.available_nodes) >= min(self.min_nodes, self.requested_node_count)

    @property
    def world_size(self) -> int:
        """World size: the total number of ranks of the nodes that can start now; of all nodes, if these cannot form a world."""
        return sum(node.slots for node in (self.available_nodes if self.can_form_world else self.nodes))

    def exclude_hosts(self, reasons: Mapping[str, tuple[str, str]]) -> Plan:
        """Return the plan in which the nodes on the given hosts are missing. `reasons`: reason and hint by host name."""
        nodes = [
            replace(node, missing_reason=reasons[node.host][0], missing_hint=reasons[node.host][1]) if node.host in reasons else node
            for node in self.nodes
        ]
        return _set_nodes(self, [*nodes, *(node for node in self.missing_nodes if node not in self.nodes)])

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a JSON-compatible dict, for `--json`."""
        return {
            "run": self.run,
            "config": self.config.to_node_config().digest,
            "launcher": self.config.runner.runner_type,
            "min_nodes": self.min_nodes,
            "max_nodes": self.max_nodes,
            "gpu": str(self.gpu_mode),
            "world_size": self.world_size,
            "micro_batches": list(self.config.topology.assign_micro_batches(self.world_size)) if self.trains_built_in_model else [],
            "nodes": [{"name": node.name, "host": node.host, "slots": node.slots, "cause": node.cause} for node in self.nodes],
            "missing": [{"name": node.name, "host": node.host, "reason": node.missing_reason} for node in self.missing_nodes],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        runner = self.config.runner
        rows = [("NODE", "HOST", "SLOTS", "WHY"), *((node.name, node.host, str(node.slots), _format_cause(node)) for node in self.nodes)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        available, requested = len(self.available_nodes), self.requested_node_count
        node_count = format_count(available, "node") if available >= requested else f"{available} of {format_count(requested, 'node')}"
        elasticity = (
            f"elastic: {self.min_nodes} to {self.max_nodes} nodes"
            if self.min_nodes < self.max_nodes
            else "not elastic: waits for a lost node"
        )
        return "\n".join(
            [
                f"run {self.run} by {runner.runner_type} on {self.origin}",
                *table,
                f"  {node_count} with {format_count(self.world_size, 'rank')}; {elasticity}",
                *(_format_batches(self.config, self.world_size) if self.trains_built_in_model else ()),
                *_format_absent_nodes(self),
                *(f"  {note}" for note in self.notes),
            ]
        )


def build_probe_run_name(run: str) -> str:
    """Return the run name of the doctor's probes for `run`, truncated to the maximum length."""
    return run[: MAX_RUN_NAME_LENGTH - len(_PROBE_SUFFIX)].rstrip("-") + _PROBE_SUFFIX


def build_plan(
    config: Config,
    inventory: Inventory,
    cargo: Cargo,
    *,
    run: str,
    node_count: int | None = None,
    placement: Placement = FRESH_PLACEMENT,
    min_nodes: int | None = None,
    machines: Collection[str] | None = None,
) -> Plan:
    """Return the plan for `run`, whose nodes keep their machines in `placement` where possible.

    `node_count`, used by `swarmtrain scale`, overrides runner.nodes. At least `min_nodes`, by default runner.min_nodes, must be available.
    `machines`: ids of the machines on which nodes may run; None: all that the config allows. The coordinator may run on any manager.

    Raises PlanError if the machines of the inventory cannot meet the config's requirements.
    """
    check_run_name(run)
    requested_count = node_count or config.runner.node_range[1]
    config, gpu_note = _resolve_gpus(config, inventory, requested_count)
    plan = Plan(
        run=run,
        config=config,
        cargo=cargo,
        nodes=(),
        origin=inventory.origin,
        coordinator_machine=_choose_coordinator_machine(config, inventory, placement),
        notes=tuple(
            filter(None, (gpu_note, _describe_unused_queue_settings(config), _describe_debug_level(config), *_describe_channels(config)))
        ),
        requested_node_count=requested_count,
    )
    usable = inventory if machines is None else inventory.restrict(machines, "used by other runs")
    plan = _set_nodes(plan, select_nodes(config, usable, requested_count, placement, min_nodes=min_nodes))
    _check_world_size(plan)
    return plan


def _resolve_gpus(config: Config, inventory: Inventory, node_count: int) -> tuple[Config, str]:
    """Return `config` with runner.swarm.gpu set, and a note on it; the note is empty if the config sets it, or if it has no effect.

    The config that the nodes receive contains the mode: scaling a run does not change it.
    """
    mode, reason = resolve_gpu_mode(config, list_usable_machines(config, inventory), node_count)
    swarm = config.runner.swarm.model_copy(update={"gpu": mode})
    runner = config.runner.model_copy(update={"swarm": swarm})
    return config.model_copy(update={"runner": runner}), f"gpu: {mode} ({reason})" if reason else ""


def _describe_unused_queue_settings(config: Config) -> str:
    """Return a note on the settings for a queue, if the launcher has none; else an empty string."""
    names = [f"runner.{name}" for name in config.runner.queue_settings]
    if not names or config.runner.capabilities.has_queue:
        return ""
    return f"{', '.join(names)}: no effect, since {config.runner.runner_type} has no queue; runner_type swarm has one (swarmtrain queue up)"


def _describe_debug_level(config: Config) -> str:
    """Return a warning if ranks without GPUs have a debug level of torch.distributed with which gloo crashes; else an empty string."""
    level = config.runner.env.get(_DEBUG_LEVEL_VARIABLE) or ""
    if level.upper() != "DETAIL" or config.runner.swarm.gpu is not GpuMode.none:
        return ""
    return (
        f"warning: runner.env.{_DEBUG_LEVEL_VARIABLE}: {level} crashes DistributedDataParallel over gloo with SIGSEGV, a fault of torch; "
        "set INFO, unless the ranks use NCCL"
    )


def _describe_channels(config: Config) -> list[str]:
    """Return a note on each channel of notifications."""
    needs = "; the image needs the package apprise" if config.runner.capabilities.runs_in_containers else "; needs the package apprise"
    return [
        f"notify.{name}: {channel.type}, {', '.join(channel.events)}{needs if channel.type is ChannelType.apprise else ''}"
        for name, channel in config.notify.items()
    ]


def _set_nodes(plan: Plan, nodes: Sequence[PlannedNode]) -> Plan:
    """Return `plan` with `nodes`, those that are missing as missing nodes, which only some launchers create."""
    missing_nodes = tuple(node for node in nodes if node.missing_reason)
    created = tuple(node for node in nodes if plan.config.runner.capabilities.starts_missing_nodes or not node.missing_reason)
    return replace(plan, nodes=created, missing_nodes=missing_nodes)


def add_notes(plan: Plan, *notes: str) -> Plan:
    """Return `plan` with the non-empty `notes` added."""
    return replace(plan, notes=(*plan.notes, *filter(None, notes)))


def _choose_coordinator_machine(config: Config, inventory: Inventory, placement: Placement) -> Machine | None:
    """Return the manager that must run the coordinator, because the nodes receive its address; None if any manager may run it.

    A coordinator that runs keeps its machine: all nodes restart if they receive another address.

    The nodes need an address only on the host network, where service names do not resolve.
    """
    runner = config.runner
    if not (runner.is_on_host_network and runner.capabilities.has_managers):
        return None
    master_addr = runner.master_addr
    managers = [machine for machine in inventory.machines if machine.is_manager and not machine.unavailable_reason]
    managers.sort(key=lambda machine: placement.coordinator not in (machine.id, machine.host))
    if master_addr:
        configured = next(
            (machine for machine in managers if master_addr in (machine.host, machine.id, machine.address)), Machine(host=master_addr)
        )
        return replace(configured, address=master_addr)
    if not managers or not managers[0].address:
        raise PlanError(
            f"{inventory.origin}: no manager address is known, but nodes on the host network need one",
            place="config runner.master_addr",
            hint="set it to the address of a manager",
        )
    first_manager = managers[0]
    host_addresses = {host.name: host.address for host in runner.host_entries}
    return replace(
        first_manager, address=host_addresses.get(first_manager.host) or host_addresses.get(first_manager.id) or first_manager.address
    )


def check_run_name(run: str) -> None:
    """Check that `run` is a valid stack name, and a valid host name when a service name is appended. Raises PlanError if not."""
    if not _RUN_NAME_PATTERN.fullmatch(run) or len(run) > MAX_RUN_NAME_LENGTH:
        raise PlanError(
            f"must consist of lower-case letters, digits and -, at most {MAX_RUN_NAME_LENGTH} characters, because it becomes part of "
            f"host names",
            place=f"run name {run!r}",
            hint="swarmtrain deploy config.yml --name my-run",
        )


def _check_world_size(plan: Plan) -> None:
    topology = plan.config.topology
    try:
        topology.compute_data_parallel_size(plan.world_size)
    except ValueError as error:
        missing = "".join(f"; {node.host} is {node.missing_reason}" for node in plan.missing_nodes if plan.can_form_world)
        raise PlanError(f"{error}{missing}", place="config topology", hint="change the slots, the nodes, or the parallel sizes") from None
    is_elastic = plan.min_nodes < plan.max_nodes
    if topology.world_size and topology.world_size != plan.world_size and not is_elastic:
        raise PlanError(
            f"{topology.world_size}, but the slots of {format_count(len(plan.nodes), 'node')} add up to {plan.world_size} ranks",
            place="config topology.world_size",
            hint="remove it: it is derived from the nodes",
        )


def _format_cause(node: PlannedNode) -> str:
    return f"waits, because the host is {node.missing_reason}; {node.cause}" if node.missing_reason else node.cause


def _format_absent_nodes(plan: Plan) -> list[str]:
    """Return the lines on requested nodes that the launcher does not create: it cannot start them later, or no machine is left."""
    absent = [node for node in plan.missing_nodes if node not in plan.nodes]
    lines = [f"  without {node.host}, which is {node.missing_reason}; deploy or scale again to add it" for node in absent]
    if machineless := plan.requested_node_count - len(plan.nodes) - len(absent):
        lines.append(f"  no machine for {format_count(machineless, 'node')}; deploy or scale again when more have joined")
    return lines


def _format_batches(config: Config, world_size: int) -> list[str]:
    """Return the lines on replicas, micro batches and pipeline stages of the built-in trainer."""
    topology = config.topology
    micro_batches = topology.assign_micro_batches(world_size)
    batch_share = f"{micro_batches[0]} each" if len(set(micro_batches)) == 1 else f"{micro_batches[0]} or {micro_batches[-1]} each"
    by_speed = " at first, then by speed" if topology.reassigns_micro_batches(len(micro_batches)) else ""
    count = sum(micro_batches)
    global_batch = f"global batch {topology.samples_per_step} = {count} micro batch{'' if count == 1 else 'es'}"
    return [
        f"  {format_count(len(micro_batches), 'replica')} of {_format_replica_topology(topology)}",
        f"  {global_batch} of {topology.samples_per_micro_batch}, {batch_share}{by_speed}",
        *_format_learners(config, world_size),
        *_format_pipeline_layout(config, micro_batches),
        *_format_gradient_compression(topology),
    ]


def _format_gradient_compression(topology: TopologyConfig) -> list[str]:
    mode = topology.gradient_compression
    return [f"  gradient compression {mode}: {mode.reproducibility}"] if mode.reproducibility else []


def _format_learners(config: Config, world_size: int) -> list[str]:
    """Return the line on learners (DiLoCo); empty if there are none."""
    topology = config.topology
    if topology.learners is None:
        return []
    groups = topology.assign_learners(world_size)
    most, replicas = max(map(len, groups)), topology.compute_data_parallel_size(world_size) // len(groups)
    share = f"up to {most} per replica" if most > 1 else f"{format_count(replicas, 'replica')} each"
    return [f"  {format_count(topology.learners, 'learner')}, {share}: the result depends on the number of learners, not of ranks"]


def _format_replica_topology(topology: TopologyConfig) -> str:
    extra_dimensions = [
        *(["pipeline"] if topology.pipeline_parallel_size > 1 else []),
        *(["context"] if topology.context_parallel_size > 1 else []),
    ]
    return f"{format_count(topology.ranks_per_replica, 'rank')} ({' x '.join(['data', *extra_dimensions, 'tensor'])} parallel)"


def _format_pipeline_layout(config: Config, micro_batches: Sequence[int]) -> list[str]:
    topology = config.topology
    if topology.pipeline_parallel_size == 1:
        return []
    layers = ", ".join(str(len(stage)) for stage in pipeline_layout.partition_layers(topology, config.transformer_architecture))
    return [
        f"  pipeline of {topology.pipeline_stage_count} stages with {layers} layers; idle "
        f"{pipeline_layout.compute_bubble_fraction(topology, micro_batches[0]):.0%} of a step"
    ]
