"""The machines of a cluster: their states, their GPUs by number with the runs to which they are allocated, and their cores. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swarmtrain.launchers.base import RunOverview
from swarmtrain.protocol import RENDEZVOUS_SERVICE
from swarmtrain.queueing.decisions.queue_model import (
    CORES,
    GPU_ID_PREFIX,
    UNKNOWN_GPUS,
    Allocation,
    Ledger,
    QueueSnapshot,
    count_gpus,
)
from swarmtrain.queueing.queue_state import QueueState
from swarmtrain.view.status import build_status

_READY = "ready"
_IDLE_STATES = ("down", "queued", "stopped", "shutdown", "complete", "failed", "rejected", "remove", "orphaned", "dead")


@dataclass(frozen=True)
class MachineAllocation:
    """What is allocated to one run, or another service, on a machine."""

    user: str
    """The run, or a text for a service that is none."""
    gpus: float
    """Number of GPUs."""
    gpu_numbers: tuple[int, ...] = ()
    """The numbers of these GPUs; empty if they are unknown."""
    cores: float = 0.0
    is_shared: bool = False
    """Whether the same GPUs and cores may be allocated to other runs, because all of them share."""
    is_saving: bool = False
    """Whether a stop of its node was requested, and the node still runs."""


@dataclass(frozen=True)
class ClusterMachine:
    """One machine of a cluster, with what it has and to whom it is allocated."""

    name: str
    """The host name; the id, if several machines have this host name."""
    location: str
    """The backend to which it belongs, such as a swarm."""
    state: str
    """ready, down, drained, paused or unknown; empty if its launcher does not report it."""
    gpu_ids: tuple[str, ...] = ()
    """The id of each GPU by its number; empty texts if only their number is known."""
    gpus_allocated: float = 0.0
    cores: float | None = None
    """None if the number of cores is unknown."""
    cores_allocated: float = 0.0
    allocations: tuple[MachineAllocation, ...] = ()


@dataclass(frozen=True)
class SwarmState:
    """The machines of a swarm and what is allocated on them."""

    location: str
    queue: QueueState
    gpu_ids: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Ids of the GPUs of each machine, by the machine's id."""
    starts: Mapping[str, float] = field(default_factory=dict)
    """In how many seconds waiting runs start, by run, as far as that is known."""


def build_cluster_machines(
    swarm: SwarmState | None, located_overviews: Iterable[tuple[str, RunOverview]], now: float
) -> tuple[ClusterMachine, ...]:
    """Return the machines of `swarm`, and those on which runs of other launchers are, as far as their overviews report them."""
    overviews = list(located_overviews)
    own = [overview for location, overview in overviews if swarm and location == swarm.location]
    machines = list(_iterate_swarm_machines(swarm, own)) if swarm else []
    others = [item for item in overviews if not swarm or item[0] != swarm.location]
    return (*machines, *_iterate_other_machines(others, now, {machine.name for machine in machines}))


def _iterate_swarm_machines(swarm: SwarmState, overviews: Sequence[RunOverview]) -> Iterator[ClusterMachine]:
    snapshot, machines = swarm.queue.snapshot, swarm.queue.inventory.machines
    allocations_by_machine = _collect_allocations(snapshot)
    ledger = Ledger(snapshot.machines)
    for machine_id, allocations in allocations_by_machine.items():
        for _, allocation, _ in allocations:
            ledger.add(machine_id, allocation)
    host_counts = Counter(machine.host for machine in machines)
    reserved = _collect_reserved_ids(overviews)
    for machine in machines:
        capacity = ledger.machines[machine.id].capacity
        kinds = [kind for kind in capacity if kind != CORES]
        count = round(sum(capacity[kind] for kind in kinds))
        ids = swarm.gpu_ids.get(machine.id, ())
        ids = ids if len(ids) == count else ("",) * count
        yield ClusterMachine(
            machine.host if host_counts[machine.host] == 1 else machine.id,
            swarm.location,
            machine.unavailable_reason or _READY,
            ids,
            gpus_allocated=min(float(len(ids)), sum(capacity[kind] - max(0.0, ledger.compute_free(machine.id, kind)) for kind in kinds)),
            cores=machine.cores or None,
            cores_allocated=min(machine.cores, machine.cores - ledger.compute_free(machine.id, CORES)),
            allocations=tuple(
                _build_machine_allocation(user, allocation, ids, reserved.get(user, frozenset()), is_saving=is_saving)
                for user, allocation, is_saving in allocations_by_machine.get(machine.id, ())
            ),
        )


def _collect_allocations(snapshot: QueueSnapshot) -> dict[str, list[tuple[str, Allocation, bool]]]:
    """Return by machine to whom what is allocated, and whether its stop was requested."""
    allocations: dict[str, list[tuple[str, Allocation, bool]]] = defaultdict(list)
    for run in snapshot.runs:
        for machine in sorted(run.allocated) if not run.is_finished else ():
            allocations[machine].append((run.run, run.get_allocation(machine), False))
        for machine, leaving in run.leaving.items():
            allocations[machine].append((run.run, leaving, True))
    for external in snapshot.external_allocations:
        allocations[external.machine].append((external.user, external.allocation, False))
    return allocations


def _collect_reserved_ids(overviews: Iterable[RunOverview]) -> dict[str, frozenset[str]]:
    """Return the ids of the GPUs that Swarm has assigned to each run."""
    return {overview.run: frozenset(gpu for task in overview.tasks for gpu in task.gpus) for overview in overviews}


def _build_machine_allocation(
    user: str, allocation: Allocation, ids: Sequence[str], reserved: frozenset[str], *, is_saving: bool
) -> MachineAllocation:
    total = allocation.total
    count = float(len(ids)) if UNKNOWN_GPUS in total and total[UNKNOWN_GPUS] >= 1 else round(count_gpus(allocation), 2)
    return MachineAllocation(
        user,
        count,
        _find_gpu_numbers(total, count, ids, reserved),
        cores=total.get(CORES, 0.0),
        is_shared=bool(allocation.shared),
        is_saving=is_saving,
    )


def _find_gpu_numbers(amounts: Mapping[str, float], count: float, ids: Sequence[str], reserved: frozenset[str]) -> tuple[int, ...]:
    """Return the numbers of the GPUs: those that it selects, those that Swarm has assigned to it, or all, if all are allocated to it."""
    selected = {name.removeprefix(GPU_ID_PREFIX) for name in amounts if name.startswith(GPU_ID_PREFIX)}
    if numbers := tuple(number for number, gpu in enumerate(ids) if str(number) in selected or (gpu and gpu in selected | reserved)):
        return numbers
    return tuple(range(len(ids))) if ids and count >= len(ids) else ()


def _iterate_other_machines(
    located_overviews: Sequence[tuple[str, RunOverview]], now: float, taken_names: Container[str]
) -> Iterator[ClusterMachine]:
    """Yield the hosts of the running tasks. Their nodes report the GPUs that are allocated to them. No name is one of `taken_names`."""
    allocations: dict[tuple[str, str], list[MachineAllocation]] = defaultdict(list)
    for location, overview in located_overviews:
        usage = build_status(overview.run, overview.last_events, overview.tasks, now).usage
        for task in overview.tasks:
            if task.host and task.node != RENDEZVOUS_SERVICE and task.state not in _IDLE_STATES:
                allocations[location, task.host].append(
                    MachineAllocation(overview.run, float(len(usage.get(task.node, {}).get("gpus") or [])))
                )
    host_counts = Counter(host for _, host in allocations)
    for (location, host), machine_allocations in sorted(allocations.items()):
        name = host if host_counts[host] == 1 and host not in taken_names else f"{host}, {location}"
        yield ClusterMachine(
            name,
            location,
            "",
            gpus_allocated=sum(allocation.gpus for allocation in machine_allocations),
            allocations=tuple(machine_allocations),
        )
