"""Reading a local run's files while they grow: the board's events and the nodes' output, as updates."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swarmtrain.launchers.base import LogLine, TaskState, Update
from swarmtrain.launchers.kept import events_in, timed
from swarmtrain.launchers.local.folder import RunFolder
from swarmtrain.wire import VERDICT, Event

_POLL = 0.1
_TRAIL = 5.0  # seconds after the verdict in which nodes may still print their last lines


class Tail:
    """A file that grows; one that begins anew is read anew."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0
        self.rest = b""

    def lines(self) -> list[str]:
        """Return the whole lines that have come since the last call."""
        try:
            if self.path.stat().st_size < self.offset:
                self.offset, self.rest = 0, b""
            with self.path.open("rb") as file:
                file.seek(self.offset)
                new = file.read()
        except OSError:
            return []
        self.offset += len(new)
        *whole, self.rest = (self.rest + new).split(b"\n")
        return [line.decode(errors="replace") for line in whole]


def events(folder: RunFolder, since: float | None = None) -> list[Event]:
    """Return the events on the board so far, from `since` on."""
    return list(events_in(Tail(folder.events).lines(), since or 0.0))


class Log(Tail):
    """What a node prints."""

    def __init__(self, node: str, path: Path, *, from_end: bool = False) -> None:
        super().__init__(path, from_end=from_end)
        self.node, self.time = node, 0.0

    def log_lines(self) -> list[LogLine]:
        """Return the whole lines that have come since the last call, with their times."""
        found = []
        for text in self.lines():
            found.append(timed(self.node, text, self.time))
            self.time = found[-1].time
        return found


def logs(folder: RunFolder, *, follow: bool, tail: int | None, since: float | None, node: str | None) -> Iterator[LogLine]:
    """Yield the output of the nodes, or of one, and go on as long as the run does if `follow`."""
    readers: dict[str, Log] = {}
    while True:
        alive = any(folder.alive(name) for name in folder.names())
        found = []
        for name in (each for each in folder.names() if node in (None, each)):
            new = name not in readers
            lines = readers.setdefault(name, Log(name, folder.log(name))).log_lines()
            lines = [line for line in lines if line.time >= (since or 0.0)]
            found.append(lines[max(0, len(lines) - tail) :] if new and tail is not None else lines)
        yield from heapq.merge(*found, key=lambda line: line.time)
        if not follow or not alive:
            return
        time.sleep(_POLL)


def watch(folder: RunFolder, tasks: Callable[[], list[TaskState]]) -> Iterator[Update]:
    """Yield events from the start, output and states from now on, until a verdict and its last lines, or the run's removal."""
    board = Tail(folder.events)
    readers = {name: Log(name, folder.log(name), from_end=True) for name in folder.names()}
    states: dict[str, TaskState] = {}
    verdict_at: float | None = None
    while True:
        exists, over = folder.exists, verdict_at is not None
        found = tasks() if exists else []
        for state in found:
            if states.get(state.node) != state:
                states[state.node] = state
                yield state
        for name in folder.names():
            yield from readers.setdefault(name, Log(name, folder.log(name))).log_lines()
        for line in board.lines():
            if event := Event.from_line(line):
                verdict_at = verdict_at or (time.monotonic() if event.kind == VERDICT else None)
                yield event
        ended = all(state.state in ("complete", "shutdown") for state in found)
        if not exists or (over and (ended or time.monotonic() - (verdict_at or 0.0) > _TRAIL)):
            return
        time.sleep(_POLL)
