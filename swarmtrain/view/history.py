"""Events → what befell a run, line by line with times; and the runs that are known here. Values that print themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain import wire
from swarmtrain.view.status import progress_line, status
from swarmtrain.view.stream import event_line
from swarmtrain.view.times import clock, counted, duration
from swarmtrain.view.worlds import worlds
from swarmtrain.wire import EXIT_PLANNED, Event

_ASKED = {"up": "brought up from here", "stop": "stopped from here", "down": "taken down from here"}


@dataclass(frozen=True)
class Entry:
    """One thing that happened: when (seconds since the epoch), of which kind (see swarmtrain.wire), in words, and the event's data."""

    time: float
    kind: str
    text: str
    data: dict[str, Any]


@dataclass(frozen=True)
class History:
    """What befell a run, oldest first."""

    run: str
    entries: tuple[Entry, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs, for --json."""
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(f"{clock(entry.time)}  {entry.text}" for entry in self.entries)


@dataclass(frozen=True)
class Known:
    """A run that is there, or was. `state` as in a status, or down; times are seconds since the epoch."""

    run: str
    state: str
    started: float | None
    seconds: float | None
    step: int | None
    why: str
    last: float | None


@dataclass(frozen=True)
class Runs:
    """The runs known here, the newest last."""

    runs: tuple[Known, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs, for --json."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [("RUN", "STARTED", "FOR", "STEP", "STATE", "")]
        for each in self.runs:
            started = clock(each.started) if each.started is not None else ""
            length = duration(each.seconds) if each.seconds is not None else ""
            rows.append((each.run, started, length, "" if each.step is None else str(each.step), each.state, each.why))
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join(
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip() for row in rows
        )


def history(run: str, events: Sequence[Event]) -> History:
    """Return what befell `run`: all events but what its nodes used, and of its progress what was said last before something else."""
    why = {world.time: world for world in worlds(events)}
    entries: list[Entry] = []
    for event, after in zip(events, [*events[1:], None], strict=False):
        if event.kind == wire.PROGRESS and after is not None and after.kind in (wire.PROGRESS, wire.USAGE):
            continue
        text = _line(event)
        if event.kind == wire.WORLD:
            text = f"world {why[event.time].number}: {text}{f', since {why[event.time].why}' if why[event.time].why else ''}"
        if text:
            entries.append(Entry(event.time, event.kind, text, event.data))
    return History(run, tuple(entries))


def known(run: str, events: Sequence[Event], state: str | None, now: float) -> Known:
    """Return what is to be said of a run in a list; `state` None for one that is down, and whose last time that was."""
    found = status(run, events, (), now)
    last = events[-1].time if events else None
    over = found.ended is not None or state is None
    ended = found.ended or last
    seconds = None if found.started is None or ended is None else (ended if over else now) - found.started
    how = found.state if found.ended else state or "down"
    return Known(run, how, found.started, seconds, found.progress.get("step"), found.why, last)


def runs(found: Iterable[Known]) -> Runs:
    """Return the list of these, the newest last."""
    return Runs(tuple(sorted(found, key=lambda each: (each.started or 0.0, each.run))))


def _line(event: Event) -> str:
    """Return an event as a line, also where the stream of a run that is followed has no use for it."""
    data = event.data
    if event.kind == wire.BOARD_UP:
        return "its notice board is up"
    if event.kind == wire.PROGRESS:
        return f"step {progress_line(data)}"
    if event.kind == wire.LEFT:
        return _left(data)
    if event.kind == wire.ASKED:
        nodes = f", with {counted(data['nodes'], 'node')}" if "nodes" in data else ""
        code = f", the code being {data['code']}" if "code" in data else ""
        return f"{_ASKED.get(str(data.get('what')), str(data.get('what')))}{nodes}{code}"
    return event_line(event) or ""


def _left(data: Mapping[str, Any]) -> str:
    code = data.get("exit_code")
    how = {None: "fell silent", 0: "has ended", EXIT_PLANNED: "has left, as it was told to"}.get(code, f"left with exit code {code}")
    return f"{data.get('node')} {how}"
