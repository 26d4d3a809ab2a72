"""Change the order of waiting runs: what `swarmtrain queue move` does."""

from __future__ import annotations

from dataclasses import replace

from swarmtrain.errors import StackError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.queue_entry import EntryState, QueueEntry
from swarmtrain.launchers.swarm.queueing.queue_model import QueuedRun
from swarmtrain.launchers.swarm.queueing.queue_state import QueueState
from swarmtrain.launchers.swarm.queueing.submission import write_entry


def move_run(engine: DockerEngine, state: QueueState, run: str, place: int) -> QueueEntry:
    """Move the waiting `run` to `place` among the waiting runs of its priority, 1 for the first, and return its new entry.

    Raises StackError if the run does not wait, EngineError.
    """
    waiting = list_waiting_runs(state)
    own = next((queued for queued in waiting if queued.run == run), None)
    if own is None:
        entry = state.members[run].entry if run in state.members else None
        raise StackError(
            f"does not wait: it is {entry.state}" if entry else "is not in the queue", place=f"run {run}", hint="swarmtrain queue status"
        )
    others = [queued for queued in waiting if queued.priority == own.priority and queued.run != run]
    index = max(0, min(place - 1, len(others)))
    before = others[index - 1].position if index else None
    after = others[index].position if index < len(others) else None
    member = state.members[run]
    entry = replace(member.entry, position=_choose_position(before, after, own.position))
    write_entry(engine, member.coordinator, entry)
    return entry


def list_waiting_runs(state: QueueState) -> list[QueuedRun]:
    """Return the waiting runs in the order in which they are served."""
    return sorted((run for run in state.snapshot.runs if run.state is EntryState.waiting), key=lambda run: run.sort_key)


def _choose_position(before: float | None, after: float | None, unchanged: float) -> float:
    """Return a position between the two; outside of them if there is only one; `unchanged` if there is none."""
    if before is None:
        return unchanged if after is None else after - 1.0
    return before + 0.5 if after is None else (before + after) / 2
