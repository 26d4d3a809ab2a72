"""Small clusters and runs for the tests of the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.queue_model import (
    Allocation,
    ChangeKind,
    MachineSupply,
    QueueChange,
    QueuedRun,
    QueueSnapshot,
)

GPU = "NVIDIA-GPU"


def build_machines(count: int, gpus: float = 8, cores: float = 32) -> tuple[MachineSupply, ...]:
    """Return machines m0, m1 …"""
    return tuple(MachineSupply(f"m{index}", f"host{index}", {GPU: gpus, "cores": cores}) for index in range(count))


def build_run(
    name: str,
    machines: tuple[MachineSupply, ...],
    *,
    gpus: float = 8,
    nodes: int = 1,
    min_nodes: int | None = None,
    priority: int = 0,
    position: float = 0.0,
    allocated: frozenset[str] | None = None,
    allocation: Allocation | None = None,
    **fields: object,
) -> QueuedRun:
    """Return a run that can use all `machines`: waiting, or admitted on `allocated`."""
    needs = {machine.id: allocation or Allocation({GPU: gpus}) for machine in machines}
    run = QueuedRun(
        run=name,
        owner="anna",
        priority=priority,
        position=position,
        state=EntryState.waiting if allocated is None else EntryState.admitted,
        needs=needs,
        min_nodes=nodes if min_nodes is None else min_nodes,
        nodes=nodes,
        allocated=allocated or frozenset(),
    )
    return replace(run, **fields)  # type: ignore[arg-type]  # the fields that a test sets


def apply_changes(snapshot: QueueSnapshot, changes: tuple[QueueChange, ...]) -> QueueSnapshot:
    """Return the snapshot after `changes`: what a run gives up is leaving until `complete_leaving`."""
    runs = {run.run: run for run in snapshot.runs}
    for change in changes:
        run = runs[change.run]
        leaving = {**run.leaving, **{machine: run.get_allocation(machine) for machine in run.allocated - change.machines}}
        state = EntryState.waiting if change.kind is ChangeKind.preempt else EntryState.admitted
        runs[change.run] = replace(run, state=state, allocated=change.machines, leaving=leaving)
    return replace(snapshot, runs=tuple(runs.values()))


def complete_leaving(snapshot: QueueSnapshot) -> QueueSnapshot:
    """Return the snapshot after all leaving nodes have stopped."""
    return replace(snapshot, runs=tuple(replace(run, leaving={}) for run in snapshot.runs))


def map_changes(changes: tuple[QueueChange, ...]) -> Mapping[str, tuple[str, list[str]]]:
    """Return (kind, machines) of each change by run."""
    return {change.run: (str(change.kind), sorted(change.machines)) for change in changes}
