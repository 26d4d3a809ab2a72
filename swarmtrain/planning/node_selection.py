"""Select the machines of a run's nodes from an inventory, by the hosts that the config lists or by its labels, with reasons.

Machines that are available come first. If there are fewer than the run wants, missing ones follow: machines that are down or drained, and
listed hosts that are not in the inventory. All functions are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmtrain.config import Config
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner import GpuMode
from swarmtrain.config.schema.section import format_duplicates
from swarmtrain.errors import PlanError
from swarmtrain.planning.inventory import Inventory, Machine, is_node_id
from swarmtrain.planning.placement import Placement, assign_nodes

_SLOT_PER_PROBED_GPU = "one slot per GPU, as last probed"


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
    missing_reason: str = ""
    """Why the node cannot start now, for example `down`; empty if it can."""
    missing_hint: str = ""
    """What makes the node's machine available, preferably a command."""
    has_slot_per_gpu: bool = False
    """Whether the slots are the number of GPUs that the machine had when it was last probed, which may have changed since."""


@dataclass(frozen=True)
class _Candidate:
    """A machine on which a node may run. `cause`: why it is one. `names`: its id, and its host name if no other machine has it."""

    machine: Machine
    cause: str
    constraint: str
    names: tuple[str, ...]
    entry: HostEntry | None = None


def select_nodes(
    config: Config, inventory: Inventory, node_count: int, placement: Placement, *, min_nodes: int | None = None
) -> tuple[PlannedNode, ...]:
    """Return at most `node_count` nodes, ordered by number. Nodes keep their machines in `placement` where possible.

    Missing machines are selected only if fewer than `node_count` are available. Raises PlanError if fewer than `min_nodes` are available,
    by default runner.min_nodes; also, unless `min_nodes` is given, if a host is needed whose name is unknown.
    """
    candidates = (_list_configured_hosts if config.runner.hosts else _list_eligible_machines)(config, inventory, node_count)
    available = [candidate for candidate in candidates if not candidate.machine.unavailable_reason]
    required = min(node_count, config.runner.node_range[0]) if min_nodes is None else min_nodes
    if len(available) < required:
        raise _build_shortage_error(config, inventory, candidates, required, node_count)
    placed_machines = set(placement.machines.values())
    missing = [candidate for candidate in candidates if candidate.machine.unavailable_reason]
    missing.sort(key=lambda candidate: (candidate.machine.is_unknown, placed_machines.isdisjoint(candidate.names)))
    needed = missing[: max(0, node_count - len(available))]
    if min_nodes is None and (unknown := next((candidate.machine for candidate in needed if candidate.machine.is_unknown), None)):
        raise _build_machine_error(config, unknown)
    selected = available + needed
    assigned = assign_nodes(selected, [candidate.names for candidate in selected], node_count, placement)
    return tuple(_plan_node(config, name, candidate, placement) for name, candidate in assigned)


def list_usable_machines(config: Config, inventory: Inventory) -> list[Machine]:
    """Return the machines of the inventory on which the config lets nodes run, whether they are available or not."""
    if config.runner.hosts:
        names = {host.name for host in config.runner.host_entries}
        return [machine for machine in inventory.machines if names & {machine.host, machine.id}]
    return [machine for machine in inventory.machines if _has_required_labels(config, machine)]


def _list_configured_hosts(config: Config, inventory: Inventory, node_count: int) -> list[_Candidate]:
    """Return the hosts that the config lists, in its order. Raises PlanError if there are too few, or one is ambiguous."""
    hosts = config.runner.host_entries
    if node_count > len(hosts):
        raise PlanError(
            f"lists {format_count(len(hosts), 'host')}, but {format_count(node_count, 'node')} are requested",
            place="config runner.hosts",
            hint="list more hosts in the config and deploy it again, or add them to the run: swarmtrain scale --add HOST",
        )
    machines_by_name: dict[str, list[Machine]] = {}
    for machine in inventory.machines:
        for name in {machine.id, machine.host} - {""}:
            machines_by_name.setdefault(name, []).append(machine)
    candidates = []
    for number, host in enumerate(hosts, 1):
        machine = _find_machine(inventory, machines_by_name.get(host.name, []), host.name)
        by_id = bool(machine.id) and host.name == machine.id
        constraint = f"node.id=={machine.id}" if by_id else f"node.hostname=={machine.host}"
        cause = f"entry {number} of hosts{' (by id)' if by_id else ''}"
        candidates.append(_Candidate(machine, cause, constraint, (machine.id, machine.host), host))
    if duplicates := format_duplicates(candidate.machine.id or candidate.machine.host for candidate in candidates):
        raise PlanError(
            f"lists one node twice, by its host name and by its ID: {duplicates}", place="config runner.hosts", hint="keep one of the two"
        )
    return candidates


def _find_machine(inventory: Inventory, candidates: Sequence[Machine], name: str) -> Machine:
    """Return the machine of `candidates` that the config lists as `name`; a missing one if there is none.

    A machine that has joined the cluster twice is its available entry. Raises PlanError if several available machines have this host name.
    """
    matches = [machine for machine in candidates if machine.id == name] or list(candidates)
    if not matches:
        known = ", ".join(machine.host for machine in inventory.machines) or "none"
        return Machine(
            host=name,
            id=name if is_node_id(name) else "",
            unavailable_reason=f"not in {inventory.origin} (its nodes: {known})",
            unavailable_hint="list the nodes with: docker node ls",
            is_unknown=True,
        )
    available = [machine for machine in matches if not machine.unavailable_reason]
    if len(available) > 1:
        ids = ", ".join(machine.id for machine in available)
        message = f"{len(available)} nodes have this host name; their IDs: {ids}"
        raise PlanError(message, place=f"config runner.hosts: {name}", hint="use the ID instead")
    return (available or matches)[0]


def _list_eligible_machines(config: Config, inventory: Inventory, node_count: int) -> list[_Candidate]:
    """Return the machines of the inventory that have the labels which the config requires."""
    usable = list_usable_machines(config, inventory)
    eligible = _select_machines_with_gpus(config, usable)
    available = [machine for machine in eligible if not machine.unavailable_reason]
    host_counts = Counter(machine.host for machine in available)
    names_of_missing = Counter(machine.host for machine in eligible if machine.host not in host_counts)
    required = " with the labels" * bool(_get_required_labels(config)) + " with GPUs" * (len(eligible) < len(usable))
    description = f"{format_count(len(available), 'ready node')}{required}, by name"
    are_interchangeable = len(host_counts) == 1 < len(available)  # as in an inventory with more machines than any plan needs
    candidates = []
    number = 0
    for machine in eligible:
        if machine.unavailable_reason:
            cause, is_unique = "", names_of_missing[machine.host] == 1
        else:
            number += 1
            cause = "" if are_interchangeable else f"{number} of {description}"
            is_unique = host_counts[machine.host] == 1
        # A host name that two machines share is ambiguous, so the id is used as the constraint.
        constraint = f"node.hostname=={machine.host}" if is_unique else f"node.id=={machine.id}"
        names = (machine.id, machine.host) if is_unique else (machine.id,)
        candidates.append(_Candidate(machine, cause, constraint, names))
    return candidates


def _select_machines_with_gpus(config: Config, machines: Sequence[Machine]) -> list[Machine]:
    """Return the machines that have the GPUs which the run uses, and those that may have some; all machines if none is known to.

    GPUs are reserved only on machines that declare them. Machines that have not been probed may have GPUs, and come last.
    """
    kind, mode = config.runner.swarm.generic_resource, config.runner.swarm.gpu
    if mode is GpuMode.none or not config.runner.capabilities.has_managers:
        return [*machines]
    if mode is GpuMode.reserve:
        return [machine for machine in machines if machine.resources.get(kind)] or [*machines]
    with_gpus = [machine for machine in machines if machine.count_gpus(kind)]
    unprobed = [machine for machine in machines if machine not in with_gpus and machine.gpu_count is None]
    return [*with_gpus, *unprobed] or [*machines]


def _get_required_labels(config: Config) -> Mapping[str, str]:
    return config.runner.swarm.labels if config.runner.capabilities.has_managers else {}  # only machines of a swarm have labels


def _has_required_labels(config: Config, machine: Machine) -> bool:
    return _get_required_labels(config).items() <= dict(machine.labels).items()


def _plan_node(config: Config, name: str, candidate: _Candidate, placement: Placement) -> PlannedNode:
    machine, entry = candidate.machine, candidate.entry
    slots, slots_reason = _resolve_slot_count(config, entry.slots if entry else None, machine)
    rank_interface = entry.address if entry and config.runner.is_on_host_network else ""
    is_kept = placement.is_machine_of(name, machine.id, machine.host)
    place = f"keeps its host, {candidate.cause}" if is_kept and entry else "keeps its host" if is_kept else candidate.cause
    causes = [
        place,
        slots_reason,
        f"ranks communicate via {rank_interface}" if rank_interface else "",
    ]
    return PlannedNode(
        name,
        machine.host,
        candidate.constraint,
        slots,
        "; ".join(filter(None, causes)),
        (entry.gpus if entry else ()) or config.runner.swarm.gpu_ids,
        rank_interface or machine.address,
        rank_interface,
        machine.unavailable_reason,
        machine.unavailable_hint,
        has_slot_per_gpu=slots_reason == _SLOT_PER_PROBED_GPU,
    )


def _build_machine_error(config: Config, machine: Machine) -> PlanError:
    key = "hosts" if config.runner.hosts else "nodes"
    return PlanError(
        f"the node is {machine.unavailable_reason}", place=f"config runner.{key}: {machine.host}", hint=machine.unavailable_hint
    )


def _build_shortage_error(
    config: Config, inventory: Inventory, candidates: Sequence[_Candidate], required: int, node_count: int
) -> PlanError:
    """Return the error for too few available machines, with the reason why each of the others cannot be used."""
    missing = [candidate.machine for candidate in candidates if candidate.machine.unavailable_reason]
    place = "config runner.hosts" if config.runner.hosts else "config runner.nodes"
    causes = [_build_machine_error(config, machine) for machine in missing]
    if config.runner.hosts and len(causes) == 1:
        return causes[0]
    has_own_hints = len({machine.unavailable_hint for machine in missing}) > 1
    reasons = [] if has_own_hints else [f"{machine.host} is {machine.unavailable_reason}" for machine in missing]
    reasons += [f"{machine.host} lacks the labels" for machine in inventory.machines if not _has_required_labels(config, machine)]
    usable = [] if config.runner.hosts else list_usable_machines(config, inventory)
    reasons += [f"{machine.host} has no GPUs" for machine in usable if machine not in _select_machines_with_gpus(config, usable)]
    needed = f"at least {required} of " if required < node_count else ""
    usable_count = len(candidates) - len(missing)
    reasons_text = f" ({'; '.join(reasons)})" if reasons else ""
    return PlanError(
        f"{needed}{format_count(node_count, 'node')} requested, but {usable_count} can be used on {inventory.origin}{reasons_text}",
        place=place,
        hint=None if has_own_hints else _suggest_fix_for_shortage(config, missing, candidate_count=len(candidates)),
        causes=tuple(causes) if has_own_hints else (),
    )


def _suggest_fix_for_shortage(config: Config, missing: Sequence[Machine], *, candidate_count: int) -> str:
    if config.runner.hosts or 0 < candidate_count == len(missing):
        return missing[0].unavailable_hint
    if not candidate_count and (labels := _get_required_labels(config)):
        return f"docker node update {' '.join(f'--label-add {key}={value}' for key, value in sorted(labels.items()))} NODE"
    return "request fewer nodes with: swarmtrain plan CONFIG -o runner.nodes=N"


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
    return _count_slots_of_machine(config, machine)


def _count_slots_of_machine(config: Config, machine: Machine) -> tuple[int, str]:
    """Return one slot for each GPU that the machine is known to have, if the run uses GPUs, and the reason."""
    runner = config.runner
    kind = runner.swarm.generic_resource
    if runner.swarm.gpu is GpuMode.none and not runner.capabilities.sees_all_gpus:
        return 1, "one slot"
    if declared_count := machine.resources.get(kind):
        return declared_count, f"one slot per {kind}"
    if machine.gpu_count and runner.swarm.gpu is not GpuMode.reserve:
        return machine.gpu_count, _SLOT_PER_PROBED_GPU
    return 1, "one slot"


def format_count(number: int, noun: str) -> str:
    """Return `number` with `noun`, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
