"""History of a run, computed from its events: one line per event, with its time. Also the list of known runs.

RunHistory and RunList format themselves as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from swarmtrain import protocol
from swarmtrain.protocol import EXIT_PLANNED, Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.view.formatting import format_count, format_duration, format_table, format_time
from swarmtrain.view.run_table import RunRow
from swarmtrain.view.status import build_status, format_progress
from swarmtrain.view.update_printer import format_event
from swarmtrain.view.worlds import list_worlds

_REQUEST_TEXTS = {"up": "deployed from this machine", "stop": "stopped from this machine", "down": "taken down from this machine"}


@dataclass(frozen=True)
class HistoryEntry:
    """Entry of a run's history: its time (seconds since the epoch), event kind (see swarmtrain.protocol), text, and the event's data."""

    time: float
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class RunHistory:
    """The history of a run, oldest entry first."""

    run: str
    id: str
    owner: str
    entries: tuple[HistoryEntry, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the history as a JSON-compatible dict, for `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{format_time(entry.time)}  {entry.text}" for entry in self.entries)


@dataclass(frozen=True)
class RunList:
    """The runs that are known on this machine, newest last."""

    runs: tuple[RunRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the list of runs as a JSON-compatible dict, for `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("RUN", "ID", "OWNER", "STARTED", "FOR", "STEP", "STATE", "")]
        for summary in self.runs:
            started = format_time(summary.started) if summary.started is not None else ""
            length = format_duration(summary.seconds) if summary.seconds is not None else ""
            step = "" if summary.step is None else str(summary.step)
            rows.append((summary.run, summary.id, summary.owner, started, length, step, summary.state, summary.reason))
        return format_table(rows)


def build_history(run: str, identity: RunIdentity, events: Sequence[Event]) -> RunHistory:
    """Return the history of `run`, which has the events `events`."""
    return RunHistory(run, identity.id, identity.owner, tuple(build_history_entries(events)))


def build_history_entries(events: Sequence[Event]) -> list[HistoryEntry]:
    """Return an entry for each event, except resource usage, and of successive progress events only for the last one."""
    worlds_by_time = {world.time: world for world in list_worlds(events)}
    entries: list[HistoryEntry] = []
    for event, next_event in zip(events, [*events[1:], None], strict=False):
        if (
            event.kind == protocol.EVENT_PROGRESS
            and next_event is not None
            and next_event.kind in (protocol.EVENT_PROGRESS, protocol.EVENT_USAGE)
        ):
            continue
        text = _format_event(event)
        if event.kind == protocol.EVENT_WORLD_FORMED:
            world = worlds_by_time[event.time]
            text = f"world {world.number}: {text}{f', since {world.reason}' if world.reason else ''}"
        if text:
            entries.append(HistoryEntry(event.time, event.kind, text, event.data))
    return entries


def summarize_run(run: str, identity: RunIdentity, events: Sequence[Event], state: str | None, now: float) -> RunRow:
    """Return the summary of a run. `state` is None for a run that is down; the time of its last event is then its end."""
    run_status = build_status(run, events, (), now)
    last_time = events[-1].time if events else None
    has_ended = run_status.ended is not None or state is None
    ended = run_status.ended or last_time
    seconds = None if run_status.started is None or ended is None else (ended if has_ended else now) - run_status.started
    final_state = run_status.state if run_status.ended else state or "down"
    resumed = next((event for event in events if event.kind == protocol.EVENT_RESUMED), None)
    return RunRow(
        run,
        identity.id,
        identity.owner,
        original_id=str(resumed.data.get("run_id") or identity.id) if resumed else identity.id,
        state=final_state,
        started=run_status.started,
        seconds=seconds,
        step=run_status.progress.get("step"),
        reason=run_status.reason,
        last=last_time,
    )


def merge_continued_runs(summaries: Sequence[RunRow]) -> list[RunRow]:
    """Return `summaries`, oldest first, with one summary for all runs of a name that resumed the same checkpoints."""
    merged: dict[tuple[str, str], RunRow] = {}
    for summary in sorted(summaries, key=lambda each: each.started or 0.0):
        key = (summary.run, summary.original_id)
        merged[key] = _continue_summary(merged[key], summary) if key in merged else summary
    return list(merged.values())


def _continue_summary(earlier: RunRow, later: RunRow) -> RunRow:
    seconds = None if earlier.seconds is None and later.seconds is None else (earlier.seconds or 0.0) + (later.seconds or 0.0)
    step = earlier.step if later.step is None else later.step
    return replace(later, id=earlier.id, started=earlier.started or later.started, seconds=seconds, step=step)


def build_run_list(summaries: Iterable[RunRow]) -> RunList:
    """Return the list of the runs in `summaries`, newest last."""
    return RunList(tuple(sorted(summaries, key=lambda each: (each.started or 0.0, each.run))))


def _format_event(event: Event) -> str:
    """Return the event as a line of text, including events that are not printed while a run is followed."""
    data = event.data
    if event.kind == protocol.EVENT_COORDINATOR_STARTED:
        return "its coordinator is up"
    if event.kind == protocol.EVENT_PROGRESS:
        return f"step {format_progress(data)}"
    if event.kind == protocol.EVENT_NODE_LEFT:
        return _format_node_exit(data)
    if event.kind == protocol.EVENT_OPERATION:
        nodes = f", with {format_count(data['nodes'], 'node')}" if "nodes" in data else ""
        code = f", code {data['code']}" if "code" in data else ""
        return f"{_REQUEST_TEXTS.get(str(data.get('operation')), str(data.get('operation')))}{nodes}{code}"
    return format_event(event) or ""


def _format_node_exit(data: Mapping[str, Any]) -> str:
    code = data.get("exit_code")
    description = {None: "stopped sending heartbeats", 0: "has ended", EXIT_PLANNED: "has exited, as requested"}.get(
        code, f"exited with exit code {code}"
    )
    return f"{data.get('node')} {description}"
