"""The queue as values: what machines have, what runs need, what is allocated, and the state of each run. No engine, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swarmtrain.queue_labels import EntryState

CORES = "cores"
"""Name of the cores of a machine as a resource; the other resources are GPUs, by the kind that the machine declares."""
UNKNOWN_GPUS = "GPUs"
"""Name of all GPUs of a machine whose number is unknown, because it neither declares them nor was probed. Every machine has one."""
GPU_ID_PREFIX = "GPU "
"""Prefix of the name of one GPU, selected by its number or UUID. Every machine has one of each."""
_TOLERANCE = 1e-6

Amounts = Mapping[str, float]
"""Amounts of resources by name."""


@dataclass(frozen=True)
class Allocation:
    """Resources that one node of a run needs on a machine, or that are allocated to it there."""

    exclusive: Amounts = field(default_factory=dict)
    shared: Amounts = field(default_factory=dict)
    """What the run shares with other runs that share, too: only the largest of these allocations counts."""

    @property
    def total(self) -> dict[str, float]:
        """The exclusive and the shared amounts together."""
        return {**self.exclusive, **{name: amount + self.exclusive.get(name, 0.0) for name, amount in self.shared.items()}}


@dataclass(frozen=True)
class MachineSupply:
    """A machine of the swarm and its resources."""

    id: str
    host: str
    capacity: Amounts
    is_available: bool = True
    """Whether tasks can start there now."""
    is_lost: bool = False
    """Whether the nodes of runs should move elsewhere: it is down or drained. Its state is unknown for seconds after managers fail."""

    def get_capacity(self, resource: str) -> float:
        """Return the amount of `resource` that the machine has."""
        if resource == UNKNOWN_GPUS or resource.startswith(GPU_ID_PREFIX):
            return 1.0
        return self.capacity.get(resource, 0.0)


@dataclass(frozen=True)
class ExternalAllocation:
    """Resources on a machine that are allocated outside the queue: to a run deployed without the queue, or to another service."""

    user: str
    machine: str
    allocation: Allocation


@dataclass(frozen=True)
class QueuedRun:
    """A run with an entry in the queue. Machines are given by their ids."""

    run: str
    owner: str
    priority: int
    position: float
    """Order within a priority: lower positions first. Positions are version indexes of the managers, not times."""
    state: EntryState
    needs: Mapping[str, Allocation]
    """What one node of the run needs on each machine that its config allows."""
    min_nodes: int
    nodes: int
    allocated: frozenset[str] = frozenset()
    """Machines on which a node of the run is admitted."""
    leaving: Mapping[str, Allocation] = field(default_factory=dict)
    """Machines on which a node of the run still runs after its stop was requested."""
    is_preemptible: bool = True
    is_finished: bool = False
    """Whether the run has its outcome: nothing is allocated to it."""
    time_limit: float | None = None
    """Seconds that the run may still train, if it has a limit."""

    @property
    def sort_key(self) -> tuple[int, float, str]:
        """Key by which runs are ordered: the highest priority first, then the lowest position."""
        return (-self.priority, self.position, self.run)

    def get_allocation(self, machine: str) -> Allocation:
        """Return what a node of the run gets on `machine`: nothing if the config does not allow it, or if it has left the swarm."""
        return self.needs.get(machine) or Allocation()


@dataclass(frozen=True)
class OwnerLimit:
    """Maximum of what is allocated to the admitted runs of one owner together. None: no limit."""

    gpus: int | None = None
    nodes: int | None = None
    runs: int | None = None


@dataclass(frozen=True)
class QueueSnapshot:
    """The state of the queue at one moment, which decisions are made from."""

    machines: tuple[MachineSupply, ...]
    runs: tuple[QueuedRun, ...]
    external_allocations: tuple[ExternalAllocation, ...] = ()
    limits: Mapping[str, OwnerLimit] = field(default_factory=dict)
    """Limits by owner; `*` applies to every owner that is not listed."""

    def find_limit(self, owner: str) -> OwnerLimit:
        """Return the limit of `owner`."""
        return self.limits.get(owner) or self.limits.get("*") or OwnerLimit()


class ChangeKind(StrEnum):
    """What the scheduler does to a run."""

    admit = "admit"
    grow = "grow"
    shrink = "shrink"
    preempt = "preempt"


@dataclass(frozen=True)
class QueueChange:
    """A change that the scheduler has decided. `machines`: all machines of the run after the change."""

    kind: ChangeKind
    run: str
    machines: frozenset[str]
    cause: str


@dataclass(frozen=True)
class Decision:
    """Changes to make, in order, and the reason why each of the other runs waits."""

    changes: tuple[QueueChange, ...]
    reasons: Mapping[str, str]


def count_gpus(allocation: Allocation) -> float:
    """Return the number of GPUs in `allocation`. All GPUs of a machine whose number is unknown count as one."""
    counted = {name: amount for name, amount in allocation.total.items() if name != CORES}
    by_id = sum(amount for name, amount in counted.items() if name.startswith(GPU_ID_PREFIX))
    return max(by_id, sum(amount for name, amount in counted.items() if not name.startswith(GPU_ID_PREFIX)))


class Ledger:
    """The resources of all machines, with what is allocated of them."""

    def __init__(self, machines: tuple[MachineSupply, ...]) -> None:
        self.machines = {machine.id: machine for machine in machines}
        self._exclusive: dict[str, dict[str, float]] = {machine.id: {} for machine in machines}
        self._shared: dict[str, list[Amounts]] = {machine.id: [] for machine in machines}

    def add(self, machine: str, allocation: Allocation) -> None:
        """Record `allocation` on `machine`, even if it does not fit. Allocations on an unknown machine are ignored."""
        self._change(machine, allocation, 1.0)

    def remove(self, machine: str, allocation: Allocation) -> None:
        """Undo `add`."""
        self._change(machine, allocation, -1.0)

    def compute_free(self, machine: str, resource: str) -> float:
        """Return the free amount of `resource`; negative if more is allocated than there is."""
        return (
            self.machines[machine].get_capacity(resource)
            - self._exclusive[machine].get(resource, 0.0)
            - max((shared.get(resource, 0.0) for shared in self._shared[machine]), default=0.0)
        )

    def compute_increase(self, machine: str, allocation: Allocation) -> dict[str, float]:
        """Return by how much `allocation` would increase what is allocated on `machine`: a shared one only by what exceeds the largest."""
        increase = dict(allocation.exclusive)
        for resource, amount in allocation.shared.items():
            largest = max((shared.get(resource, 0.0) for shared in self._shared[machine]), default=0.0)
            increase[resource] = increase.get(resource, 0.0) + max(0.0, amount - largest)
        return increase

    def fits(self, machine: str, allocation: Allocation) -> bool:
        """Return whether `allocation` fits into what is free on `machine`, which is available."""
        supply = self.machines.get(machine)
        if supply is None or not supply.is_available:
            return False
        if self._shared[machine] or allocation.shared:
            return all(
                amount <= self.compute_free(machine, resource) + _TOLERANCE
                for resource, amount in self.compute_increase(machine, allocation).items()
            )
        allocated = self._exclusive[machine]
        return all(
            allocated.get(resource, 0.0) + amount <= supply.get_capacity(resource) + _TOLERANCE
            for resource, amount in allocation.exclusive.items()
        )

    def _change(self, machine: str, allocation: Allocation, sign: float) -> None:
        allocated = self._exclusive.get(machine)
        if allocated is None:
            return
        for resource, amount in allocation.exclusive.items():
            allocated[resource] = allocated.get(resource, 0.0) + sign * amount
        if allocation.shared:
            if sign > 0:
                self._shared[machine].append(allocation.shared)
            else:
                self._shared[machine].remove(allocation.shared)
