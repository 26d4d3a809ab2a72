"""Table of the runs in the queue, in the order in which they are served: class, nodes, state, and why and how long each one waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.launchers.base import RunOverview
from swarmtrain.launchers.common.engine_values import parse_number
from swarmtrain.protocol import EVENT_PROGRESS
from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.estimates import estimate_starts
from swarmtrain.queueing.decisions.queue_model import Allocation, QueuedRun
from swarmtrain.queueing.queue_service import SchedulerStatus
from swarmtrain.queueing.queue_state import QueueMember, QueueState
from swarmtrain.view.formatting import format_count, format_duration, format_table

_RUNNING, _WAITING = "running", "waiting"
NO_SCHEDULER_TEXT = "there is no scheduler: runs that wait stay waiting; start one with: swarmtrain queue up"


@dataclass(frozen=True)
class QueueRow:
    """One run in the queue."""

    run: str
    id: str
    owner: str
    priority_class: str
    priority: int
    state: str
    """waiting, running, saving (stop requested), incomplete or stopped."""
    nodes: int
    """Number of nodes that it has."""
    min_nodes: int
    wanted_nodes: int
    resources_per_node: dict[str, float]
    """What one node needs, by resource, on the first machine that its config allows."""
    hosts: tuple[str, ...]
    since: float
    """Time of the last change of its state, in seconds since the epoch."""
    reason: str = ""
    lost_steps: int = 0
    """Steps that it lost when it was killed instead of saving, at its last preemption or time limit."""
    estimate: float | None = None
    """Seconds until it starts, if that is known."""
    trained_seconds: float = 0.0
    """Seconds for which it had nodes before: a waiting run that has trained was preempted, or has lost its machine."""


@dataclass(frozen=True)
class QueueTable:
    """The runs in the queue at `time`, in seconds since the epoch: running ones first, then those that wait, in order."""

    scheduler: SchedulerStatus | None
    """None if the swarm has no scheduler, so that nobody starts the runs that wait."""
    runs: tuple[QueueRow, ...]
    time: float
    classes: tuple[str, ...] = ()
    """The classes of the policy."""

    def to_dict(self) -> dict[str, Any]:
        """Return the table as a JSON-compatible dict, for `--json`."""
        return {"scheduler": self.scheduler and self.scheduler.to_dict(), "runs": [asdict(row) for row in self.runs], "time": self.time}

    def __str__(self) -> str:
        scheduler = str(self.scheduler or NO_SCHEDULER_TEXT)
        if not self.runs:
            return f"{scheduler}\nthe queue is empty"
        header = ["RUN", "OWNER", "CLASS", "NODES", "STATE", "SINCE", "STARTS IN", ""]
        table = format_table([header, *(self._format_row(row) for row in self.runs)])
        return f"{table}\n{scheduler}"

    def _format_row(self, row: QueueRow) -> list[str]:
        since = format_duration(max(0.0, self.time - row.since)) if row.since else ""
        estimate = "" if row.state != _WAITING else self._format_estimate(row.estimate)
        nodes = f"{row.nodes}/{row.wanted_nodes}"
        lost = f"{format_count(row.lost_steps, 'step')} lost: it did not save within its grace" if row.lost_steps else ""
        remark = "; ".join(filter(None, (row.reason or ", ".join(row.hosts), lost)))
        return [row.run, row.owner, row.priority_class, nodes, row.state, since, estimate, remark]

    def _format_estimate(self, seconds: float | None) -> str:
        """Return when a waiting run starts. The estimate is 0 if those that it waits for should have ended by now."""
        if seconds is None or self.scheduler is None:
            return "unknown"
        return format_duration(seconds) if seconds else "soon"


def estimate_queue_starts(state: QueueState, overviews: Sequence[RunOverview], now: float) -> dict[str, float]:
    """Return in how many seconds waiting runs start, by run, as far as that is known. `overviews`: with the time left of running runs.

    With 200 waiting runs and 50 machines this takes seconds.
    """
    return estimate_starts(state.snapshot, {**_list_expected_ends(overviews, now), **state.list_ends()})


def build_queue_table(state: QueueState, scheduler: SchedulerStatus | None, starts: Mapping[str, float], now: float) -> QueueTable:
    """Return the table of the queue. `starts`: in how many seconds waiting runs start, by run, as far as that is known."""
    runs = [run for run in state.snapshot.runs if not run.is_finished]
    runs.sort(key=lambda run: (run.state is not EntryState.admitted, run.state is not EntryState.waiting, run.sort_key))
    return QueueTable(
        scheduler, tuple(_build_row(state, state.members[run.run], run, starts) for run in runs), now, tuple(state.policy.classes)
    )


def _build_row(state: QueueState, member: QueueMember, run: QueuedRun, starts: Mapping[str, float]) -> QueueRow:
    hosts = {machine.id: machine.host for machine in state.snapshot.machines}
    runner = member.config.runner if member.config else None
    return QueueRow(
        run=run.run,
        id=member.identity.id,
        owner=run.owner,
        priority_class=(runner.priority if runner else None) or state.policy.default_class,
        priority=run.priority,
        state=_describe_state(run),
        nodes=len(run.allocated),
        min_nodes=run.min_nodes,
        wanted_nodes=run.nodes,
        resources_per_node=next(iter(run.needs.values()), Allocation()).total,
        hosts=tuple(sorted(hosts.get(machine, machine) for machine in run.allocated)),
        since=member.entry.changed,
        reason="; ".join(filter(None, (member.problem or member.entry.reason, member.malformed_labels))),
        lost_steps=member.entry.lost_steps,
        estimate=starts.get(run.run),
        trained_seconds=member.entry.trained_seconds,
    )


def _describe_state(run: QueuedRun) -> str:
    if run.state is EntryState.admitted:
        return _RUNNING
    return "saving" if run.leaving else str(run.state)


def _list_expected_ends(overviews: Sequence[RunOverview], now: float) -> dict[str, float]:
    """Return in how many seconds runs end by their own estimate, by run, as far as they report one."""
    ends = {}
    for overview in overviews:
        progress = next((event for event in reversed(overview.last_events) if event.kind == EVENT_PROGRESS), None)
        if progress is not None and progress.data.get("eta_seconds") is not None:
            ends[overview.run] = max(0.0, parse_number(progress.data["eta_seconds"]) - (now - progress.time))
    return ends
