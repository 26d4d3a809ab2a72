"""Decide which waiting runs start, and which running ones shrink, grow or stop for them. Pure: a snapshot in, a decision out.

The rules, in this order:

1. Runs are served by priority, then by position. A run that exceeds a limit of its owner is skipped.
2. A run starts if `min_nodes` of its machines are free, and takes up to `nodes`: all of them at once, or none.
3. Otherwise it takes what it needs for `min_nodes` from preemptible runs of lower priority: first surplus nodes of elastic runs, which
   shrink, then whole runs, which save, stop and wait again; the lowest priority and the youngest first, and no more than necessary.
4. Otherwise it waits. A run behind it may start only if that cannot delay it: on what the waiting run could not use in any case, or, if the
   time limits of all runs in question are known, if it ends before the waiting run could start (conservative backfill).
5. What the waiting runs of a priority leave over goes to elastic runs of that priority with fewer than `nodes` nodes, and to those that
   have lost a machine. Then it is the turn of the next lower priority.

So within a priority no run starves: what it needs accumulates. A run starves only while runs of higher priority take all that it could use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.preemption import Victim, VictimSearch
from swarmtrain.queueing.decisions.queue_model import (
    Allocation,
    ChangeKind,
    Decision,
    Ledger,
    OwnerLimit,
    QueueChange,
    QueuedRun,
    QueueSnapshot,
    count_gpus,
)

_TOLERANCE = 1e-6
_MAX_NAMES = 3


def decide(snapshot: QueueSnapshot, ends: Mapping[str, float] | None = None) -> Decision:
    """Return what to change now, and why each other waiting run waits.

    `ends`: in how many seconds admitted runs end at the latest, by run, for those with a time limit.
    """
    return _Admission(snapshot, ends or {}).decide()


@dataclass
class _Usage:
    """What is allocated to the admitted runs of an owner."""

    gpus: float = 0.0
    nodes: int = 0
    runs: int = 0


class _Admission:
    def __init__(self, snapshot: QueueSnapshot, ends: Mapping[str, float]) -> None:
        self._snapshot, self._ends = snapshot, ends
        self._changes: list[QueueChange] = []
        self._reasons: dict[str, str] = {}
        self._ledger = _build_ledger(snapshot)
        self._allocated = {run.run: run.allocated for run in snapshot.runs if _is_admitted(run)}
        self._leaving = {run.run: _make_all_exclusive(run.leaving) for run in snapshot.runs if run.leaving}
        self._usage: dict[str, _Usage] = {}
        for run in snapshot.runs:
            if _is_admitted(run):
                self._count_usage(run, run.allocated, is_new=True)
        # Per machine and resource: what a run may use without delaying one that waits. Absent: no waiting run could use it.
        self._allowed: dict[str, dict[str, float]] = {}
        self._blocked: list[QueuedRun] = []
        # In how many seconds each blocked run could start; None if that is unknown.
        self._starts: list[float | None] = []

    def decide(self) -> Decision:
        """Apply the rules of this module to each run in order."""
        # Of each priority, the waiting runs come first, and then the running ones that want more nodes.
        for run in sorted(self._snapshot.runs, key=lambda run: (-run.priority, _is_admitted(run), run.sort_key)):
            if _is_admitted(run):
                self._grow(run)
            elif run.state is not EntryState.waiting:
                continue
            elif reason := self._describe_exceeded_limit(run):
                self._reasons[run.run] = reason
            elif not self._admit(run):
                self._block(run)
        return Decision(tuple(self._changes), self._reasons)

    def _admit(self, run: QueuedRun) -> bool:
        """Start `run` if it fits. Return False if it must wait."""
        if run.run in self._leaving:
            return False  # its nodes of last time still save
        count = self._limit_node_count(run, run.nodes)
        machines = self._select_machines(run, count)
        if len(machines) < run.min_nodes:
            return False
        self._allocate(run, machines)
        self._allocated[run.run] = frozenset(machines)
        self._count_usage(run, machines, is_new=True)
        cause = "its nodes are free" if len(machines) == run.nodes else f"{len(machines)} of {run.nodes} nodes are free"
        self._changes.append(QueueChange(ChangeKind.admit, run.run, frozenset(machines), cause))
        return True

    def _grow(self, run: QueuedRun) -> None:
        """Give an admitted run the nodes that it lacks, also for machines that it has lost, if that delays no run that waits."""
        if run.run not in self._allocated or run.run in self._leaving:
            return
        own = self._allocated[run.run]
        present = {machine for machine in own if not self._is_lost(machine)}
        missing = min(run.nodes, self._limit_node_count(run, run.nodes)) - len(present)
        machines = self._select_machines(run, missing, excluded=own) if missing > 0 else []
        if not machines:
            return
        self._allocate(run, machines)
        lost = sorted(own - present)[: max(0, len(own) + len(machines) - run.nodes)]
        self._allocated[run.run] = (own - frozenset(lost)) | frozenset(machines)
        self._count_usage(run, machines, is_new=False)
        cause = f"replaces {self._format_hosts(lost)}" if lost else f"free, and it wants {run.nodes} nodes"
        self._changes.append(QueueChange(ChangeKind.grow, run.run, self._allocated[run.run], f"{self._format_hosts(machines)}: {cause}"))

    def _block(self, run: QueuedRun) -> None:
        """Let `run` wait: preempt others for it if that helps, record why it waits, and reserve what it could use."""
        leavers, machines = self._find_awaited_leavers(run)
        if not machines:
            victims, machines = self._find_victims(run)
            self._preempt(victims, run)
            leavers = [victim.run.run for victim in victims]
        if run.run in self._leaving:
            self._reasons[run.run] = self._reasons.get(run.run) or "its nodes still save"
        elif leavers:
            self._reasons[run.run] = f"waits until {_format_names(leavers)} {'has' if len(leavers) == 1 else 'have'} saved"
        else:
            self._reasons[run.run] = self._describe_shortage(run)
        self._blocked.append(run)
        self._starts.append(self._estimate_start(run) if self._ends else None)
        # A run whose machines are about to become free needs only these.
        for machine in machines or run.needs:
            if machine not in self._ledger.machines:
                continue
            allowed = self._allowed.setdefault(machine, {})
            for resource, amount in run.get_allocation(machine).total.items():
                left = max(0.0, self._ledger.compute_free(machine, resource) - amount)
                allowed[resource] = min(allowed.get(resource, left), left)

    def _select_machines(self, run: QueuedRun, count: int, *, excluded: Iterable[str] = ()) -> list[str]:
        """Return at most `count` machines that `run` can take now, in the order of its config."""
        selected: list[str] = []
        is_exempt = self._ends_before_blocked_runs(run)
        for machine, allocation in run.needs.items():
            if len(selected) >= count:
                break
            if machine not in excluded and self._can_allocate(machine, allocation, is_exempt=is_exempt):
                selected.append(machine)
        return selected

    def _can_allocate(self, machine: str, allocation: Allocation, *, is_exempt: bool = False) -> bool:
        if not self._ledger.fits(machine, allocation):
            return False
        allowed = self._allowed.get(machine)
        if not allowed or is_exempt:
            return True
        # Shared amounts count fully here: who joins runs that share keeps the resource in use after they have ended.
        return all(amount <= allowed.get(resource, amount) + _TOLERANCE for resource, amount in allocation.total.items())

    def _ends_before_blocked_runs(self, run: QueuedRun) -> bool:
        """Return whether `run` ends before any of the runs that wait in front of it could start."""
        return run.time_limit is not None and all(start is not None and run.time_limit <= start for start in self._starts)

    def _allocate(self, run: QueuedRun, machines: Iterable[str]) -> None:
        for machine in machines:
            allowed = self._allowed.get(machine, {})
            for resource, amount in run.needs[machine].total.items():
                if resource in allowed:
                    allowed[resource] = max(0.0, allowed[resource] - amount)
            self._ledger.add(machine, run.needs[machine])

    def _find_awaited_leavers(self, run: QueuedRun) -> tuple[list[str], list[str]]:
        """Return the runs whose leaving nodes make `run` fit, and its machines then; two empty lists if that does not suffice."""
        leaving = [(name, machine, allocation) for name, machines in self._leaving.items() for machine, allocation in machines.items()]
        if not leaving:
            return [], []
        for _, machine, allocation in leaving:
            self._ledger.remove(machine, allocation)
        machines = self._select_machines(run, run.min_nodes)
        for _, machine, allocation in leaving:
            self._ledger.add(machine, allocation)
        if len(machines) < run.min_nodes:
            return [], []
        return sorted({name for name, machine, _ in leaving if machine in machines}), machines

    def _find_victims(self, run: QueuedRun) -> tuple[list[Victim], list[str]]:
        """Return the runs that must shrink or stop so that `run` fits, and its machines then; two empty lists if that does not suffice."""
        candidates = [
            Victim(other)
            for other in self._snapshot.runs
            if other.run in self._allocated
            and other.state is EntryState.admitted
            and other.is_preemptible
            and other.priority < run.priority
            and other.run not in self._leaving
            and not run.needs.keys().isdisjoint(self._allocated[other.run])
        ]
        if not candidates:
            return [], []
        candidates.sort(key=lambda victim: victim.run.sort_key, reverse=True)  # the lowest priority and the youngest first
        return VictimSearch(run, candidates, self._ledger, self._can_allocate).find()

    def _preempt(self, victims: Sequence[Victim], beneficiary: QueuedRun) -> None:
        for victim in victims:
            run = victim.run
            leaving = run.allocated if victim.stopped else frozenset(victim.shrunk)
            kind = ChangeKind.preempt if victim.stopped else ChangeKind.shrink
            self._allocated[run.run] = run.allocated - leaving
            if victim.stopped:
                del self._allocated[run.run]
            self._leaving[run.run] = _make_all_exclusive({machine: run.get_allocation(machine) for machine in leaving})
            for machine, allocation in self._leaving[run.run].items():
                self._ledger.remove(machine, run.get_allocation(machine))
                self._ledger.add(machine, allocation)
            cause = f"{beneficiary.run} of {beneficiary.owner or 'an unknown owner'} has a higher priority"
            self._changes.append(QueueChange(kind, run.run, run.allocated - leaving, cause))
            if victim.stopped:
                self._reasons[run.run] = f"preempted: {cause}"

    def _estimate_start(self, run: QueuedRun) -> float | None:
        """Return in how many seconds `run` could start if no run ends before its time limit; None if that is unknown."""
        removed: list[tuple[str, Allocation]] = []
        start = None
        by_name = {other.run: other for other in self._snapshot.runs}
        for end, name in sorted((end, name) for name, end in self._ends.items() if name in self._allocated):
            for machine in self._allocated[name]:
                allocation = by_name[name].get_allocation(machine)
                self._ledger.remove(machine, allocation)
                removed.append((machine, allocation))
            if sum(self._ledger.fits(machine, allocation) for machine, allocation in run.needs.items()) >= run.min_nodes:
                start = end
                break
        for machine, allocation in removed:
            self._ledger.add(machine, allocation)
        return start

    def _describe_exceeded_limit(self, run: QueuedRun) -> str:
        """Return which limit of its owner `run` would exceed with `min_nodes` nodes; empty if none."""
        limit, used = self._snapshot.find_limit(run.owner), self._usage.get(run.owner, _Usage())
        if limit.runs is not None and used.runs >= limit.runs:
            return f"limit of {run.owner}: {limit.runs} runs"
        if self._limit_node_count(run, run.min_nodes) < run.min_nodes:
            exceeded = _format_limit(limit)
            return f"limit of {run.owner}: {exceeded}; {used.nodes} nodes with {used.gpus:g} GPUs are allocated"
        return ""

    def _limit_node_count(self, run: QueuedRun, count: int) -> int:
        """Return how many nodes `run` may have, at most `count`, within the limits of its owner."""
        limit, used = self._snapshot.find_limit(run.owner), self._usage.get(run.owner, _Usage())
        own = self._allocated.get(run.run, frozenset())
        if limit.nodes is not None:
            count = min(count, limit.nodes - used.nodes + len(own))
        if limit.gpus is not None:
            per_node = max((count_gpus(allocation) for allocation in run.needs.values()), default=0.0)
            if per_node:
                used_by_others = used.gpus - sum(count_gpus(run.get_allocation(machine)) for machine in own)
                count = min(count, int((limit.gpus - used_by_others + _TOLERANCE) // per_node))
        return max(0, count)

    def _count_usage(self, run: QueuedRun, machines: Iterable[str], *, is_new: bool) -> None:
        usage = self._usage.setdefault(run.owner, _Usage())
        usage.runs += int(is_new)
        for machine in machines:
            usage.nodes += 1
            usage.gpus += count_gpus(run.get_allocation(machine))

    def _describe_shortage(self, run: QueuedRun) -> str:
        """Return a text on how many nodes `run` finds free, and on who has the rest."""
        free = sum(self._ledger.fits(machine, allocation) for machine, allocation in run.needs.items())
        if free >= run.min_nodes:
            ahead = [other.run for other in self._blocked if not other.needs.keys().isdisjoint(run.needs)]
            return f"behind {_format_names(ahead)}"
        users = [
            other.run
            for other in self._snapshot.runs
            if other.run in self._allocated and not run.needs.keys().isdisjoint(self._allocated[other.run])
        ]
        users += sorted({other.user for other in self._snapshot.external_allocations if other.machine in run.needs})
        unavailable = [machine for machine in run.needs if not self._is_available(machine)]
        parts = [f"{free} of {run.min_nodes} nodes free"]
        parts += [f"allocated to {_format_names(users)}"] if users else []
        parts += [f"unavailable: {self._format_hosts(unavailable)}"] if unavailable else []
        return "; ".join(parts)

    def _is_available(self, machine: str) -> bool:
        supply = self._ledger.machines.get(machine)
        return supply is not None and supply.is_available

    def _is_lost(self, machine: str) -> bool:
        supply = self._ledger.machines.get(machine)
        return supply is None or supply.is_lost

    def _format_hosts(self, machines: Iterable[str]) -> str:
        known = self._ledger.machines
        return _format_names(known[machine].host if machine in known else machine for machine in machines)


def _build_ledger(snapshot: QueueSnapshot) -> Ledger:
    ledger = Ledger(snapshot.machines)
    for external in snapshot.external_allocations:
        ledger.add(external.machine, external.allocation)
    for run in snapshot.runs:
        for machine, allocation in _make_all_exclusive(run.leaving).items():
            ledger.add(machine, allocation)
        if _is_admitted(run):
            for machine in run.allocated:
                ledger.add(machine, run.get_allocation(machine))
    return ledger


def _make_all_exclusive(allocations_by_machine: Mapping[str, Allocation]) -> dict[str, Allocation]:
    """Return the allocations of nodes that leave: no other run may start to share with them, since it would keep what others wait for."""
    return {machine: Allocation(allocation.total) for machine, allocation in allocations_by_machine.items()}


def _is_admitted(run: QueuedRun) -> bool:
    return run.state is EntryState.admitted and not run.is_finished


def _format_limit(limit: OwnerLimit) -> str:
    return ", ".join(f"{value} {name}" for name, value in (("nodes", limit.nodes), ("GPUs", limit.gpus)) if value is not None)


def _format_names(names: Iterable[str]) -> str:
    listed = list(dict.fromkeys(names))
    return (
        ", ".join(listed) if len(listed) <= _MAX_NAMES else f"{', '.join(listed[: _MAX_NAMES - 1])} and {len(listed) - _MAX_NAMES + 1} more"
    )
