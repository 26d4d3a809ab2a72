"""Estimate when waiting runs start, by simulating the ends of the admitted ones. Pure; for display only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.admission import decide
from swarmtrain.queueing.decisions.queue_model import ChangeKind, QueuedRun, QueueSnapshot

_MAX_SIMULATED_ENDS = 100


def estimate_starts(snapshot: QueueSnapshot, ends: Mapping[str, float]) -> dict[str, float]:
    """Return in how many seconds waiting runs start, by run, as far as that is known.

    `ends`: in how many seconds admitted runs end, by run, as far as that is known. A run that starts in the simulation ends after its time
    limit; without a limit, it never ends. Nobody submits, cancels or fails in the simulation.
    """
    starts: dict[str, float] = {}
    remaining, now = dict(ends), 0.0
    for _ in range(_MAX_SIMULATED_ENDS):
        decision = decide(snapshot, {name: end - now for name, end in remaining.items()})
        runs = {run.run: run for run in snapshot.runs}
        for change in decision.changes:
            run = runs[change.run]
            runs[change.run] = replace(run, allocated=change.machines, state=EntryState.admitted)
            if change.kind is ChangeKind.preempt:
                runs[change.run] = replace(run, allocated=change.machines, state=EntryState.waiting)
            elif change.kind is ChangeKind.admit:
                starts.setdefault(change.run, now)
                if run.time_limit is not None:
                    remaining[change.run] = now + run.time_limit
        snapshot = replace(snapshot, runs=tuple(replace(run, leaving={}) for run in runs.values()))
        if decision.changes:
            continue  # what has left is free now
        if not remaining or not any(run.state is EntryState.waiting for run in snapshot.runs):
            break
        ended, now = _find_next_end(remaining)
        del remaining[ended]
        snapshot = replace(snapshot, runs=tuple(_finish(run) if run.run == ended else run for run in snapshot.runs))
    return starts


def _find_next_end(ends: Mapping[str, float]) -> tuple[str, float]:
    name = min(ends, key=lambda name: (ends[name], name))
    return name, ends[name]


def _finish(run: QueuedRun) -> QueuedRun:
    return replace(run, is_finished=True, allocated=frozenset(), leaving={})
