"""Make a plan from a config and an inventory: the machine and slots of each node of the run, with reasons.

All functions are pure. A launcher derives everything that it deploys from the plan, and `str(plan)` is the output of `swarmtrain plan`.
Ranks are not planned: the rendezvous assigns them for each world.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmtrain.cargo import Cargo
from swarmtrain.config import Config, pipeline_layout
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner import GpuMode, RunnerConfig
from swarmtrain.config.schema.section import format_duplicates
from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.errors import PlanError
from swarmtrain.placement import FRESH_PLACEMENT, Placement, assign_nodes
from swarmtrain.protocol import ROLE_NODE, ROLE_PROBE

_RUN_NAME_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_NODE_ID_PATTERN = re.compile(r"[a-z0-9]{25}")
# Swarm limits config names to 64 characters; the longest name that contains the run's name is "<run>_config-<digest>".
MAX_RUN_NAME_LENGTH = 64 - len("_config-") - 10
_PROBE_SUFFIX = "-probe"
_DEFAULT_MASTER_PORT = 29500
# Ports of runs, below the ephemeral range. A run has one port each for the store, the coordinator and the probe, and one in reserve.
_FIRST_PORT, _PORTS_PER_RUN, _PORT_SETS = 20000, 4, 2500


@dataclass(frozen=True)
class Machine:
    """One machine on which a launcher can start a node."""

    host: str
    id: str = ""
    address: str = ""
    is_manager: bool = False
    unavailable_reason: str = ""
    """Why no node can be started on this machine (for example `down`, `drained`); empty if one can."""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)
    """Amounts of generic resources by kind, for example NVIDIA-GPU: 8."""
    engine: str = ""


@dataclass(frozen=True)
class Inventory:
    """The machines on which a launcher can start nodes, in the order of use, and their origin, which messages name."""

    origin: str
    machines: tuple[Machine, ...]


@dataclass(frozen=True)
class PlannedNode:
    """One node of the run: its name, machine and slots, and the reason why it runs on this machine."""

    name: str
    host: str
    constraint: str
    slots: int
    cause: str
    gpus: tuple[str, ...] = ()
    """GPUs that the node may use, by number or UUID; empty: all GPUs, or the GPUs that Swarm assigns."""
    address: str = ""
    """Address at which other nodes reach the node's machine if they share the host network; empty: the host name."""
    rank_interface: str = ""
    """Interface or address of this node on the network for ranks, if the config specifies one for its machine."""


@dataclass(frozen=True)
class Plan:
    """Plan of a run: which node runs on which machine, and why."""

    run: str
    config: Config
    cargo: Cargo
    nodes: tuple[PlannedNode, ...]
    origin: str
    is_probe: bool = False
    """Whether the nodes run the doctor's probe instead of training."""
    coordinator_machine: Machine | None = None
    """Manager machine that must run the coordinator, because the nodes receive its address; None: any manager."""
    notes: tuple[str, ...] = ()
    """Decisions that do not follow from the config alone, with reasons, one line each."""

    @property
    def trains_built_in_model(self) -> bool:
        """Whether the ranks run the built-in trainer, for which the config's topology and batch sizes are."""
        return self.config.runner.module is None and self.cargo.calls_built_in_trainer

    @property
    def role(self) -> str:
        """Role of swarmtrain.entrypoint that the nodes run: node or probe."""
        return ROLE_PROBE if self.is_probe else ROLE_NODE

    @property
    def master_port(self) -> int:
        """Port of the rendezvous store.

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
    def world_size(self) -> int:
        """World size: the total number of ranks."""
        return sum(node.slots for node in self.nodes)

    def to_dict(self) -> dict[str, object]:
        """Return the plan as a JSON-compatible dict, for `--json`."""
        return {
            "run": self.run,
            "config": self.config.to_node_config().digest,
            "launcher": self.config.runner.runner_type,
            "min_nodes": self.min_nodes,
            "max_nodes": self.max_nodes,
            "world_size": self.world_size,
            "micro_batches": list(self.config.topology.assign_micro_batches(self.world_size)) if self.trains_built_in_model else [],
            "nodes": [{"name": node.name, "host": node.host, "slots": node.slots, "cause": node.cause} for node in self.nodes],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        runner = self.config.runner
        rows = [("NODE", "HOST", "SLOTS", "WHY"), *((node.name, node.host, str(node.slots), node.cause) for node in self.nodes)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        elasticity = (
            f"elastic: {self.min_nodes} to {self.max_nodes} nodes"
            if self.min_nodes < self.max_nodes
            else "not elastic: waits for a lost node"
        )
        return "\n".join(
            [
                f"run {self.run} by {runner.runner_type} on {self.origin}",
                *table,
                f"  {_format_count(len(self.nodes), 'node')} with {_format_count(self.world_size, 'rank')}; {elasticity}",
                *(_format_batches(self.config, self.world_size) if self.trains_built_in_model else ()),
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
) -> Plan:
    """Return the plan for `run`, whose nodes keep their machines in `placement` where possible.

    `node_count`, used by `swarmtrain scale`, overrides runner.nodes.

    Raises PlanError if the machines of the inventory cannot meet the config's requirements.
    """
    check_run_name(run)
    target_count = node_count or config.runner.node_range[1]
    planned_nodes = (
        _plan_listed_hosts(config, inventory, target_count, placement)
        if config.runner.hosts
        else _plan_available_machines(config, inventory, target_count, placement)
    )
    plan = Plan(
        run=run,
        config=config,
        cargo=cargo,
        nodes=planned_nodes,
        origin=inventory.origin,
        coordinator_machine=_choose_coordinator_machine(config, inventory, placement),
    )
    _check_world_size(plan)
    return plan


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


def _plan_listed_hosts(config: Config, inventory: Inventory, node_count: int, placement: Placement) -> tuple[PlannedNode, ...]:
    hosts = config.runner.host_entries
    if node_count > len(hosts):
        raise PlanError(
            f"lists {_format_count(len(hosts), 'host')}, but {_format_count(node_count, 'node')} are requested",
            place="config runner.hosts",
            hint="list more hosts in the config and deploy it again, or add them to the run: swarmtrain scale --add HOST",
        )
    machines_by_name: dict[str, list[Machine]] = {}
    for machine in inventory.machines:
        for name in {machine.id, machine.host} - {""}:
            machines_by_name.setdefault(name, []).append(machine)
    usable: list[tuple[HostEntry, Machine]] = []
    errors: list[PlanError] = []  # of hosts that are unknown or unavailable, and may not be needed
    for host in hosts:
        try:
            usable.append((host, _find_available_machine(inventory, machines_by_name, host.name)))
        except PlanError as error:
            errors.append(error)
    if duplicates := format_duplicates(machine.id or machine.host for _, machine in usable):
        raise PlanError(
            f"lists one node twice, by its host name and by its ID: {duplicates}", place="config runner.hosts", hint="keep one of the two"
        )
    if len(usable) < node_count:
        raise errors[0]
    assigned = assign_nodes(usable, [(machine.id, machine.host) for _, machine in usable], node_count, placement)
    entry_numbers = {host.name: number for number, host in enumerate(hosts, 1)}
    return tuple(
        _plan_node(config, name, entry_numbers[host.name], host, machine, is_kept=placement.is_machine_of(name, machine.id, machine.host))
        for name, (host, machine) in assigned
    )


def _find_available_machine(inventory: Inventory, machines_by_name: Mapping[str, list[Machine]], name: str) -> Machine:
    candidates = machines_by_name.get(name, [])
    matches = [machine for machine in candidates if machine.id == name] or candidates
    if not matches:
        available = ", ".join(machine.host for machine in inventory.machines) or "none"
        raise PlanError(
            f"unknown node on {inventory.origin}; available nodes: {available}",
            place=f"config runner.hosts: {name}",
            hint="list the nodes with: docker node ls",
        )
    if len(matches) > 1:
        ids = ", ".join(machine.id for machine in matches)
        raise PlanError(
            f"{len(matches)} nodes have this host name; their IDs: {ids}",
            place=f"config runner.hosts: {name}",
            hint="use the ID instead",
        )
    if matches[0].unavailable_reason:
        is_drained_or_paused = matches[0].unavailable_reason in ("drained", "paused")
        hint = (
            f"docker node update --availability active {name}"
            if is_drained_or_paused
            else "start the node; docker node ls shows when it is ready"
        )
        raise PlanError(f"the node is {matches[0].unavailable_reason}", place=f"node {name}", hint=hint)
    return matches[0]


def _plan_node(config: Config, name: str, entry_number: int, host: HostEntry, machine: Machine, *, is_kept: bool) -> PlannedNode:
    by_id = bool(machine.id) and host.name == machine.id
    gpus = host.gpus or config.runner.swarm.gpu_ids
    slots, slots_reason = _resolve_slot_count(config, host.slots, machine)
    constraint = f"node.id=={machine.id}" if by_id else f"node.hostname=={machine.host}"
    rank_interface = host.address if config.runner.is_on_host_network else ""
    cause = (
        f"{'keeps its host, ' if is_kept else ''}entry {entry_number} of hosts{' (by id)' if by_id else ''}; "
        f"{slots_reason}{f'; ranks communicate via {rank_interface}' if rank_interface else ''}"
    )
    return PlannedNode(name, machine.host, constraint, slots, cause, gpus, rank_interface or machine.address, rank_interface)


def _plan_available_machines(config: Config, inventory: Inventory, node_count: int, placement: Placement) -> tuple[PlannedNode, ...]:
    labels = config.runner.swarm.labels if config.runner.capabilities.has_managers else {}  # only machines of a swarm have labels
    eligible = [
        machine for machine in inventory.machines if not machine.unavailable_reason and labels.items() <= dict(machine.labels).items()
    ]
    if len(eligible) < node_count:
        raise PlanError(
            _format_node_shortage(inventory, labels, len(eligible), node_count),
            place="config runner.nodes",
            hint=_format_node_shortage_hint(inventory, labels, len(eligible)),
        )
    host_counts = Counter(machine.host for machine in eligible)
    eligible_description = f"{_format_count(len(eligible), 'ready node')}{' with the labels' if labels else ''}, by name"
    are_interchangeable = len(host_counts) == 1 < len(eligible)  # as in an inventory with more machines than any plan needs
    planned_nodes = []
    numbered = list(enumerate(eligible, 1))
    names = [(machine.id, machine.host) if host_counts[machine.host] == 1 else (machine.id,) for machine in eligible]
    for name, (number, machine) in assign_nodes(numbered, names, node_count, placement):
        slots, slots_reason = _resolve_slot_count(config, None, machine)
        # A host name that two machines share is ambiguous, so the id is used as the constraint.
        constraint = f"node.hostname=={machine.host}" if host_counts[machine.host] == 1 else f"node.id=={machine.id}"
        place = "keeps its host" if placement.is_machine_of(name, machine.id, machine.host) else f"{number} of {eligible_description}"
        cause = slots_reason if are_interchangeable else f"{place}; {slots_reason}"
        planned_nodes.append(PlannedNode(name, machine.host, constraint, slots, cause, config.runner.swarm.gpu_ids, machine.address))
    return tuple(planned_nodes)


def _format_node_shortage_hint(inventory: Inventory, labels: Mapping[str, str], eligible_count: int) -> str:
    if any(not machine.unavailable_reason for machine in inventory.machines) and eligible_count == 0 and labels:
        label_options = " ".join(f"--label-add {key}={value}" for key, value in sorted(labels.items()))
        return f"docker node update {label_options} NODE"
    return "request fewer nodes with: swarmtrain plan CONFIG -o runner.nodes=N"


def _format_node_shortage(inventory: Inventory, labels: Mapping[str, str], eligible_count: int, node_count: int) -> str:
    reasons = [f"{machine.host} is {machine.unavailable_reason}" for machine in inventory.machines if machine.unavailable_reason]
    reasons += [
        f"{machine.host} lacks the labels"
        for machine in inventory.machines
        if not machine.unavailable_reason and not labels.items() <= dict(machine.labels).items()
    ]
    reasons_text = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{_format_count(node_count, 'node')} requested, but {inventory.origin} has {eligible_count} that can be used{reasons_text}"


def _resolve_slot_count(config: Config, configured_slots: int | None, machine: Machine) -> tuple[int, str]:
    runner = config.runner
    if configured_slots:
        return configured_slots, "slots from hosts"
    if runner.default_gpu_count:
        return runner.default_gpu_count, "slots from default_gpu_count"
    if runner.capabilities.has_equal_nodes and runner.slurm.requested_gpus_per_node:
        return runner.slurm.requested_gpus_per_node, "one slot per GPU allocated by Slurm"
    if runner.swarm.gpu_ids:
        return len(runner.swarm.gpu_ids), "one slot per entry of gpu_ids"
    gpu_count = machine.resources.get(runner.swarm.generic_resource, 0)
    if gpu_count and (runner.swarm.gpu is not GpuMode.none or runner.capabilities.sees_all_gpus):
        return gpu_count, f"one slot per {runner.swarm.generic_resource}"
    return 1, "one slot"


def _check_world_size(plan: Plan) -> None:
    topology = plan.config.topology
    try:
        topology.compute_data_parallel_size(plan.world_size)
    except ValueError as error:
        raise PlanError(str(error), place="config topology", hint="change the slots, the nodes, or the parallel sizes") from None
    is_elastic = plan.min_nodes < plan.max_nodes
    if topology.world_size and topology.world_size != plan.world_size and not is_elastic:
        raise PlanError(
            f"{topology.world_size}, but the slots of {_format_count(len(plan.nodes), 'node')} add up to {plan.world_size} ranks",
            place="config topology.world_size",
            hint="remove it: it is derived from the nodes",
        )


def _format_batches(config: Config, world_size: int) -> list[str]:
    """Return the lines on replicas, micro batches and pipeline stages of the built-in trainer."""
    topology = config.topology
    micro_batches = topology.assign_micro_batches(world_size)
    batch_share = f"{micro_batches[0]} each" if len(set(micro_batches)) == 1 else f"{micro_batches[0]} or {micro_batches[-1]} each"
    count = sum(micro_batches)
    global_batch = f"global batch {topology.samples_per_step} = {count} micro batch{'' if count == 1 else 'es'}"
    return [
        f"  {_format_count(len(micro_batches), 'replica')} of {_format_replica_topology(topology)}",
        f"  {global_batch} of {topology.samples_per_micro_batch}, {batch_share}",
        *_format_pipeline_layout(config, micro_batches),
    ]


def _format_replica_topology(topology: TopologyConfig) -> str:
    extra_dimensions = [
        *(["pipeline"] if topology.pipeline_parallel_size > 1 else []),
        *(["context"] if topology.context_parallel_size > 1 else []),
    ]
    return f"{_format_count(topology.ranks_per_replica, 'rank')} ({' x '.join(['data', *extra_dimensions, 'tensor'])} parallel)"


def _format_pipeline_layout(config: Config, micro_batches: Sequence[int]) -> list[str]:
    topology = config.topology
    if topology.pipeline_parallel_size == 1:
        return []
    layers = ", ".join(str(len(stage)) for stage in pipeline_layout.partition_layers(topology, config.transformer_architecture))
    return [
        f"  pipeline of {topology.pipeline_stage_count} stages with {layers} layers; idle "
        f"{pipeline_layout.compute_bubble_fraction(topology, micro_batches[0]):.0%} of a step"
    ]


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def build_offline_inventory(hosts: Iterable[HostEntry]) -> Inventory:
    """Return the inventory of `hosts`, for a plan without access to a cluster."""
    machines = tuple(Machine(host=host.name, id=host.name if _NODE_ID_PATTERN.fullmatch(host.name) else "") for host in hosts)
    return Inventory("the hosts that the config lists", machines)


def build_placeholder_inventory(runner: RunnerConfig) -> Inventory:
    """Return an inventory of machines with the placeholder names HOST0, HOST1, …, for a plan without access to a cluster.

    They have the labels in `runner`, and there are as many as its nodes.
    """
    _, node_count, _ = runner.node_range
    return Inventory("placeholder hosts", tuple(Machine(host=f"HOST{index}", labels=runner.swarm.labels) for index in range(node_count)))
