"""(config, inventory) → Plan: for each node of the run its machine, its slots, and why. Values in, a value out.

Everything a launcher sends is a function of the plan, and `str(plan)` is what `swarmtrain plan` prints.
Ranks are not planned: they are dealt at the rendezvous, anew for each world.
"""

from __future__ import annotations

import errno
import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarmtrain.config import Config, pipeline
from swarmtrain.config.base import twice
from swarmtrain.config.files import Unreadable, read
from swarmtrain.config.names import host_address, host_gpus, host_name, host_slots
from swarmtrain.config.runner import OVER_SSH, GpuMode, RunnerType
from swarmtrain.config.topology import TopologyConfig
from swarmtrain.errors import PlanError, SwarmtrainError
from swarmtrain.wire import ROLE_NODE, ROLE_PROBE

_RUN = re.compile(r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?")
_NODE_ID = re.compile(r"[a-z0-9]{25}")
# Swarm takes 64 characters for the name of a config, and the longest that cannot be shortened is "<run>_config-<digest>".
LONGEST_RUN = 64 - len("_config-") - 10
_PROBE = "-probe"
_USUAL_PORT = 29500
# Below those that kernels deal out by themselves; a run has one for the store, the board and the probe, and one to spare.
_FIRST_PORT, _PORTS_EACH, _PORT_SETS = 20000, 4, 2500
_LARGEST_FILE = 64_000_000


@dataclass(frozen=True)
class Machine:
    """One machine that a launcher can start a node on."""

    host: str
    id: str = ""
    address: str = ""
    manager: bool = False
    unavailable: str = ""
    """Why nothing can be started there (`down`, `drain`), or nothing."""
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, int] = field(default_factory=dict)
    """Generic resources by kind, for instance NVIDIA-GPU: 8."""
    engine: str = ""


@dataclass(frozen=True)
class Inventory:
    """What a launcher found: the machines, in the order in which they are to be used, and where it looked."""

    origin: str
    machines: tuple[Machine, ...]


@dataclass(frozen=True)
class CodeFile:
    """A file that travels with the run. `name` is its name beside the script, `digest` says which content it has."""

    name: str
    content: bytes
    digest: str

    @classmethod
    def of(cls, name: str, content: bytes) -> CodeFile:
        """Return the file with its digest: the first 10 hexadecimal digits of its SHA-256."""
        return cls(name, content, hashlib.sha256(content).hexdigest()[:10])


@dataclass(frozen=True)
class Cargo:
    """What the config's paths point to, read once: the script and the files beside it, and the secrets."""

    code: tuple[CodeFile, ...]
    secrets: tuple[CodeFile, ...] = ()


@dataclass(frozen=True)
class PlannedNode:
    """One node of the run."""

    name: str
    host: str
    constraint: str
    slots: int
    cause: str
    gpus: tuple[str, ...] = ()
    """The GPUs that are shown to it, by number or UUID; empty: all, or those that it is given."""
    address: str = ""
    """Where its machine is found by the others, for those that share the machines' own network; empty: by its host name."""
    talks_by: str = ""
    """Its own name or address on the network that ranks are to use, if the config says one."""


@dataclass(frozen=True)
class Plan:
    """Who runs what, and why."""

    run: str
    config: Config
    cargo: Cargo
    nodes: tuple[PlannedNode, ...]
    origin: str
    probe: bool = False
    """The nodes are looked at and do not train."""
    board: Machine | None = None
    """The manager that has the notice board, where the nodes must know its address; else it is any."""
    notes: tuple[str, ...] = ()
    """What was settled beyond the config, and why, a line each."""

    @property
    def role(self) -> str:
        """What the nodes start: a role of swarmtrain.entrypoint."""
        return ROLE_PROBE if self.probe else ROLE_NODE

    @property
    def master_port(self) -> int:
        """Port of the rendezvous store. On the machines' own network runs that are not told have ports of their own, by their names."""
        runner = self.config.runner
        if runner.master_port is not None or not runner.on_machines_network:
            return runner.master_port or _USUAL_PORT
        return _FIRST_PORT + _PORTS_EACH * (zlib.crc32(self.run.encode()) % _PORT_SETS)

    @property
    def min_nodes(self) -> int:
        return self.config.runner.node_range[0]

    @property
    def max_nodes(self) -> int:
        return self.config.runner.node_range[2]

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return sum(node.slots for node in self.nodes)

    def to_dict(self) -> dict[str, object]:
        """Return what a script needs, for --json."""
        return {
            "run": self.run,
            "config": self.config.resolved().digest,
            "launcher": self.config.runner.runner_type.value,
            "min_nodes": self.min_nodes,
            "max_nodes": self.max_nodes,
            "world_size": self.world_size,
            "micro_batches": list(self.config.topology.deal(self.world_size)),
            "nodes": [{"name": node.name, "host": node.host, "slots": node.slots, "cause": node.cause} for node in self.nodes],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        topology, runner = self.config.topology, self.config.runner
        rows = [("NODE", "HOST", "SLOTS", "WHY"), *((node.name, node.host, str(node.slots), node.cause) for node in self.nodes)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        table = ["  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        elastic = (
            f"goes on with {self.min_nodes} to {self.max_nodes}" if self.min_nodes < self.max_nodes else "waits for a node that is lost"
        )
        deal = topology.deal(self.world_size)
        share = f"{deal[0]} each" if len(set(deal)) == 1 else f"{deal[0]} or {deal[-1]} each"
        return "\n".join(
            [
                f"run {self.run} by {runner.runner_type.value} on {self.origin}",
                *table,
                f"  {_count(len(self.nodes), 'node')} with {_count(self.world_size, 'rank')}; {elastic}",
                f"  {_count(len(deal), 'replica')} of {_replica(topology)}",
                f"  global batch {topology.global_batch} = {sum(deal)} micro batches of {topology.micro_batch}, {share}",
                *_pipeline(self.config, deal),
                *(f"  {note}" for note in self.notes),
            ]
        )


def probe_name(run: str) -> str:
    """Name the run of the doctor's probes, which is beside the one that may be up; cut where names have their end."""
    return run[: LONGEST_RUN - len(_PROBE)].rstrip("-") + _PROBE


def make_plan(config: Config, inventory: Inventory, cargo: Cargo, *, run: str, nodes: int | None = None) -> Plan:
    """Return the plan for `run`. `nodes` overrides runner.nodes, which is what `scale` does.

    Raises PlanError if the inventory cannot hold what the config asks for.
    """
    check_run_name(run)
    wanted = nodes or config.runner.node_range[1]
    chosen = _named(config, inventory, wanted) if config.runner.hosts else _picked(config, inventory, wanted)
    plan = Plan(run=run, config=config, cargo=cargo, nodes=chosen, origin=inventory.origin, board=_board(config, inventory))
    _check_world(plan)
    return plan


def noted(plan: Plan, *notes: str) -> Plan:
    """Return `plan` with those of `notes` that say something."""
    return replace(plan, notes=(*plan.notes, *filter(None, notes)))


def _board(config: Config, inventory: Inventory) -> Machine | None:
    """Return the manager whose address the nodes are told: on the machines' own network there is no name that leads to the board."""
    runner = config.runner
    if not runner.swarm.on_host_network or runner.runner_type is not RunnerType.swarm:
        return None
    wanted = runner.master_addr
    managers = [machine for machine in inventory.machines if machine.manager and not machine.unavailable]
    if wanted:
        named = next((machine for machine in managers if wanted in (machine.host, machine.id, machine.address)), Machine(host=wanted))
        return replace(named, address=wanted)
    if not managers or not managers[0].address:
        raise PlanError(
            f"{inventory.origin}: no manager's address is known, and on the host network the nodes must be told one",
            place="config runner.master_addr",
            hint="set it to the address of a manager",
        )
    board = managers[0]
    given = {host_name(host): host_address(host) for host in runner.hosts or ()}
    return replace(board, address=given.get(board.host) or given.get(board.id) or board.address)


def check_run_name(run: str) -> None:
    """Raise PlanError unless `run` can name a stack and, with a service's name behind it, a host."""
    if not _RUN.fullmatch(run) or len(run) > LONGEST_RUN:
        raise PlanError(
            f"must be lower-case letters, digits and -, at most {LONGEST_RUN} of them, because it becomes part of host names",
            place=f"run name {run!r}",
            hint="swarmtrain deploy config.yml --name my-run",
        )


def read_cargo(config: Config, folder: Path) -> Cargo:
    """Read the files that `config` names, relative paths from `folder`. Raises SwarmtrainError for one that cannot be read."""
    runner = config.runner
    code = tuple(
        CodeFile.of(path.name, _content(folder / path, "runner.script" if path == runner.script else "runner.code"))
        for path in (runner.script, *runner.code)
    )
    if names := twice(item.name for item in code):
        raise PlanError(
            f"{names} is listed twice, the script counted: files travel side by side, by their names",
            place="config runner.code",
            hint="list it once, or give one of two files another name",
        )
    secrets = tuple(CodeFile.of(name, _content(folder / path, f"runner.secrets.{name}")) for name, path in sorted(runner.secrets.items()))
    return Cargo(code, secrets)


def _content(path: Path, key: str) -> bytes:
    try:
        return read(path, _LARGEST_FILE)
    except Unreadable as error:
        hint = "paths are relative to the folder you are in" if error.number == errno.ENOENT else f"ls -l {path} shows what it is"
        raise SwarmtrainError(f"{path}: {error}", place=f"config {key}", hint=hint) from None


def _named(config: Config, inventory: Inventory, wanted: int) -> tuple[PlannedNode, ...]:
    hosts = config.runner.hosts or ()
    if wanted > len(hosts):
        raise PlanError(
            f"lists {_count(len(hosts), 'host')}, but {_count(wanted, 'node')} are asked for",
            place="config runner.hosts",
            hint="list more hosts in the config and deploy it again",
        )
    known: dict[str, list[Machine]] = {}
    for machine in inventory.machines:
        for name in {machine.id, machine.host} - {""}:
            known.setdefault(name, []).append(machine)
    found = [_find(inventory, known, host_name(host)) for host in hosts[:wanted]]
    if again := twice(machine.id or machine.host for machine in found):
        raise PlanError(
            f"names one node twice, by its host name and by its id: {again}", place="config runner.hosts", hint="keep one of the two"
        )
    return tuple(_node(config, index, host, machine) for index, (host, machine) in enumerate(zip(hosts, found, strict=False)))


def _find(inventory: Inventory, known: Mapping[str, list[Machine]], name: str) -> Machine:
    called = known.get(name, [])
    found = [machine for machine in called if machine.id == name] or called
    if not found:
        there = ", ".join(machine.host for machine in inventory.machines) or "none"
        raise PlanError(
            f"there is no such node on {inventory.origin}; it has: {there}",
            place=f"config runner.hosts: {name}",
            hint="docker node ls shows them",
        )
    if len(found) > 1:
        ids = ", ".join(machine.id for machine in found)
        raise PlanError(
            f"{len(found)} nodes have this host name, with the ids {ids}", place=f"config runner.hosts: {name}", hint="write the id instead"
        )
    if found[0].unavailable:
        takes_none = found[0].unavailable in ("drained", "paused")
        hint = f"docker node update --availability active {name}" if takes_none else "start it; docker node ls shows when it is back"
        raise PlanError(f"the node is {found[0].unavailable}", place=f"node {name}", hint=hint)
    return found[0]


def _node(config: Config, index: int, host: str, machine: Machine) -> PlannedNode:
    name = host_name(host)
    by_id = bool(machine.id) and name == machine.id
    gpus = host_gpus(host) or config.runner.swarm.gpu_ids
    slots, why = _slots(config, host_slots(host), machine)
    constraint = f"node.id=={machine.id}" if by_id else f"node.hostname=={machine.host}"
    talks_by = host_address(host) if config.runner.on_machines_network else ""
    cause = f"place {index + 1} in hosts{' (by id)' if by_id else ''}; {why}{f'; ranks talk by {talks_by}' if talks_by else ''}"
    return PlannedNode(f"node{index}", machine.host, constraint, slots, cause, gpus, talks_by or machine.address, talks_by)


def _picked(config: Config, inventory: Inventory, wanted: int) -> tuple[PlannedNode, ...]:
    labels = config.runner.swarm.labels
    fitting = [machine for machine in inventory.machines if not machine.unavailable and labels.items() <= dict(machine.labels).items()]
    if len(fitting) < wanted:
        raise PlanError(
            _too_few(inventory, labels, len(fitting), wanted),
            place="config runner.nodes",
            hint=_how_to_more(inventory, labels, len(fitting)),
        )
    hosts = Counter(machine.host for machine in fitting)
    suited = f"{_count(len(fitting), 'ready node')}{' with the labels' if labels else ''}, by name"
    planned = []
    for index, machine in enumerate(fitting[:wanted]):
        slots, why = _slots(config, None, machine)
        # A host name that two machines share says nothing about which is meant, so the id pins.
        constraint = f"node.hostname=={machine.host}" if hosts[machine.host] == 1 else f"node.id=={machine.id}"
        cause = f"{index + 1} of {suited}; {why}"
        planned.append(PlannedNode(f"node{index}", machine.host, constraint, slots, cause, config.runner.swarm.gpu_ids, machine.address))
    return tuple(planned)


def _how_to_more(inventory: Inventory, labels: Mapping[str, str], fitting: int) -> str:
    if any(not machine.unavailable for machine in inventory.machines) and fitting == 0 and labels:
        words = " ".join(f"--label-add {key}={value}" for key, value in sorted(labels.items()))
        return f"docker node update {words} NODE"
    return "swarmtrain plan CONFIG -o runner.nodes=N asks for fewer"


def _too_few(inventory: Inventory, labels: Mapping[str, str], fitting: int, wanted: int) -> str:
    reasons = [f"{machine.host} is {machine.unavailable}" for machine in inventory.machines if machine.unavailable]
    reasons += [
        f"{machine.host} lacks the labels"
        for machine in inventory.machines
        if not machine.unavailable and not labels.items() <= dict(machine.labels).items()
    ]
    because = f" ({'; '.join(reasons)})" if reasons else ""
    return f"{_count(wanted, 'node')} wanted, but {inventory.origin} has {fitting} that can be used{because}"


def _slots(config: Config, given: int | None, machine: Machine) -> tuple[int, str]:
    runner = config.runner
    if given:
        return given, "slots as hosts says"
    if runner.default_gpu_count:
        return runner.default_gpu_count, "slots by default_gpu_count"
    if runner.runner_type is RunnerType.slurm and runner.slurm.gpus:
        return runner.slurm.gpus, "a slot for each GPU that Slurm gives"
    if runner.swarm.gpu_ids:
        return len(runner.swarm.gpu_ids), "a slot for each of gpu_ids"
    devices = machine.resources.get(runner.swarm.generic_resource, 0)
    if devices and (runner.swarm.gpu is not GpuMode.none or runner.runner_type in OVER_SSH):
        return devices, f"a slot for each {runner.swarm.generic_resource}"
    return 1, "one slot"


def _check_world(plan: Plan) -> None:
    topology = plan.config.topology
    try:
        topology.data_parallel(plan.world_size)
    except ValueError as error:
        raise PlanError(str(error), place="config topology", hint="change the slots, the nodes, or the parallel sizes") from None
    elastic = plan.min_nodes < plan.max_nodes
    if topology.world_size and topology.world_size != plan.world_size and not elastic:
        raise PlanError(
            f"{topology.world_size}, but the slots of {_count(len(plan.nodes), 'node')} add up to {plan.world_size} ranks",
            place="config topology.world_size",
            hint="leave it out and it follows from the nodes",
        )


def _replica(topology: TopologyConfig) -> str:
    kinds = [*(["pipeline"] if topology.pipeline > 1 else []), *(["context"] if topology.context_parallel_size > 1 else [])]
    return f"{_count(topology.replica, 'rank')} ({' x '.join(['data', *kinds, 'tensor'])} parallel)"


def _pipeline(config: Config, deal: Sequence[int]) -> list[str]:
    topology = config.topology
    if topology.pipeline == 1:
        return []
    layers = ", ".join(str(len(part)) for part in pipeline.cuts(topology, config.transformer_architecture))
    return [f"  pipeline of {topology.stages} stages with {layers} layers; idle {pipeline.idle(topology, deal[0]):.0%} of a step"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def offline(hosts: Sequence[str]) -> Inventory:
    """Return the inventory that `hosts` describes, for a plan without a cluster."""
    names = [host_name(host) for host in hosts]
    machines = tuple(Machine(host=name, id=name if _NODE_ID.fullmatch(name) else "") for name in names)
    return Inventory("the hosts that the config lists", machines)
