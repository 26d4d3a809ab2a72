"""Where a page's data come from: a run that is there, of which only what is new is read, or what was kept of one that is down."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from swarmtrain import wire
from swarmtrain.errors import EngineError, HostError, RunNotFound, StateError, SwarmtrainError
from swarmtrain.launchers import find_run, kept
from swarmtrain.launchers.base import Launcher, LogLine, TaskState
from swarmtrain.plan import probe_name
from swarmtrain.view.look import live_events
from swarmtrain.view.page.data import Data, line_data, page
from swarmtrain.view.page.story import Told
from swarmtrain.wire import Event

EVERY = 1.5
"""Seconds before a run is asked again, however many look at its page."""
LINES = 4000
"""Lines of output that are held."""
_TAIL = 500
_OVERLAP = 60.0
_UNREACHABLE = (EngineError, HostError, StateError)


class Source:
    """A run as its page shows it; any number of threads may ask. `place` is None for a run that is down."""

    def __init__(self, run: str, place: Launcher | None) -> None:
        self.run = run
        self._place = place
        self._looking = threading.Lock()
        self._lock = threading.Lock()
        """Of the lines, which come while nobody looks."""
        self._told = Told()
        self._recent: dict[str, float] = {}
        self._newest = 0.0
        self._tasks: list[TaskState] = []
        self._lines: deque[LogLine] = deque(maxlen=LINES)
        self._said = 0
        self._lost = ""
        self._asked = self._answered = 0.0
        self._made: Data = {}
        self._listener: threading.Thread | None = None
        self._add(event for event in kept.events(probe_name(run)) if event.kind == wire.LINK)
        self._recent.clear()
        self._newest = 0.0

    def page(self) -> Data:
        """Return what the page shows now; `lost` is why it is no longer new. Raises SwarmtrainError if there never was anything.

        While one asks a manager that takes its time, all others are shown what was there before.
        """
        if self._looking.acquire(blocking=not self._made):
            try:
                if not self._made or (self._place and time.monotonic() - self._asked > EVERY):
                    self._look()
                    self._asked = time.monotonic()
            finally:
                self._looking.release()
        return self._made

    def age(self) -> float:
        """Return the seconds since the run last answered; 0 for one that is down, of which nothing new will come."""
        return time.monotonic() - self._answered if self._place else 0.0

    def lines(self, after: int = 0) -> tuple[list[Data], int]:
        """Return the lines that came after number `after`, as far as they are still held, and the number of the last one."""
        self._listen()
        with self._lock:
            skipped = max(0, after - (self._said - len(self._lines)))
            return [line_data(line) for line in islice(self._lines, skipped, None)], self._said

    def last_lines(self) -> list[Data]:
        """Return the last lines of all nodes as they are now, without waiting for more. Raises SwarmtrainError."""
        if self._place is None:
            self.page()
            return self.lines()[0]
        found = list(self._place.logs(self.run, follow=False, tail=_TAIL))
        for line in found:
            self._hear(line)
        return [line_data(line) for line in found]

    def _look(self) -> None:
        if self._place is None:
            self._read_kept()
        else:
            try:
                self._ask(self._place)
                self._lost, self._answered = "", time.monotonic()
            except RunNotFound:
                if not self._made:
                    raise
                self._place = None
                self._tasks = [TaskState(task.node, task.host, "down") for task in self._tasks]
            except _UNREACHABLE as error:
                if not self._made:
                    raise
                self._lost = str(error)
        with self._lock:
            lines = list(self._lines)
        self._made = {**page(self.run, self._told, self._tasks, lines, time.time()), "lost": self._lost}

    def _ask(self, place: Launcher) -> None:
        self._add(place.events(self.run, self._newest - _OVERLAP) if self._newest else live_events(place, self.run))
        self._tasks = place.tasks(self.run)

    def _read_kept(self) -> None:
        if self._made:
            return
        events = kept.merged(kept.last_life(kept.events(self.run)), ())
        self._add(events)
        nodes = sorted({str(event.data.get("node")) for event in events if event.kind == wire.JOINED})
        self._tasks = [TaskState(node, "", "down") for node in nodes]
        for line in kept.lines(self.run):
            self._hear(line)

    def _add(self, events: Iterable[Event]) -> None:
        """Take in events, each once: what was asked for again is recognised by its line."""
        for event in events:
            line = event.to_line()
            if line in self._recent:
                continue
            self._recent[line] = event.time
            self._newest = max(self._newest, event.time)
            self._told.add(event)
        oldest = self._newest - 2 * _OVERLAP
        self._recent = {line: when for line, when in self._recent.items() if when > oldest}

    def _hear(self, line: LogLine) -> None:
        self._lines.append(line)
        self._said += 1

    def _listen(self) -> None:
        """Have a thread that reads the output; one that has ended is replaced if the run goes on."""
        with self._lock:
            if self._place is None or (self._listener and self._listener.is_alive()):
                return
            self._listener = threading.Thread(target=self._read, args=(self._place,), name="output", daemon=True)
            self._listener.start()

    def _read(self, place: Launcher) -> None:
        last = self._lines[-1].time if self._lines else 0.0
        try:
            for line in place.logs(self.run, follow=True, tail=None if last else _TAIL, since=last or None):
                if not last or line.time > last:
                    with self._lock:
                        self._hear(line)
        except SwarmtrainError:
            pass  # the page says that the run is away; the next who asks for lines has it tried again
        time.sleep(EVERY)


def source(run: str | None) -> Source:
    """Return the source of `run`, without a name of the only run there is. Raises RunNotFound if nothing is known of it."""
    try:
        place, name = find_run(run)
    except (RunNotFound, *_UNREACHABLE):
        if run is None or not kept.events(run):
            raise
        return Source(run, None)
    return Source(name, place)
