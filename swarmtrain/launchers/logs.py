"""The logs of services and containers: read once, or followed by a thread that reconnects and repeats nothing.

Swarm sends a service's log task by task, and Docker cuts lines at 16 KiB; a follow ends when the manager goes away and then
starts again from a time, not from a line. Here lines are whole, and each comes once.
"""

from __future__ import annotations

import contextlib
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.engine import Engine, LogStream, gone
from swarmtrain.wire import RENDEZVOUS, Event

_RANK = re.compile(r"\[rank (\d+)\] ?")
_TASK = "com.docker.swarm.task.id="
_RETRY = 0.5
# Lines that wait this long together are put in the order of their times.
_WINDOW = 0.2
# Clocks of nodes differ, and lines of one service's tasks may come from several nodes.
_OVERLAP = 60.0


@dataclass(slots=True)  # not frozen: ten thousand a second are made, and that would take twice as long
class Line:
    """A line of a service's log: when (as Docker writes it, so that text order is time order), by which task, and what.

    `stream` is 1 for stdout, 2 for stderr.
    """

    node: str
    time: str
    task: str
    text: str
    stream: int = 1

    @property
    def seconds(self) -> float:
        """Seconds since the epoch; 0 for a line without a time."""
        return datetime.fromisoformat(self.time).timestamp() if self.time else 0.0

    def event(self) -> Event | None:
        """Return the board's event that the line is, if it is one."""
        return Event.from_line(self.text) if self.node == RENDEZVOUS else None

    def log_line(self) -> LogLine:
        """Return the line with its rank, if a rank wrote it."""
        match = _RANK.match(self.text)
        text = self.text[match.end() :] if match else self.text
        return LogLine(self.node, text, int(match[1]) if match else None, self.seconds)


def read(engine: Engine, source: str, node: str, *, tail: int | None = None, since: float | None = None) -> list[Line]:
    """Return what there still is of the log of `source` (/services/ID, /containers/ID), in the order of time; the last `tail` lines.

    What a node has that has just died cannot be had, and is missing. Raises EngineError.
    """
    lines: list[Line] = []
    try:
        told = _lines(engine.frames(f"{source}/logs", _params(tail=tail, since=since)), node)
        # Without a time, it is the engine that says which node it does not reach.
        lines.extend(line for line in told if line.time)
    except EngineError as error:
        if error.status is not None:
            raise
        engine.get("/version")  # raises if it is the manager that does not answer
    lines.sort(key=lambda line: line.time)
    return lines if tail is None else lines[max(0, len(lines) - tail) :]


class Reader(threading.Thread):
    """Follows one log into a queue, until it is closed or its source (/services/ID, /containers/ID) is gone.

    `before` are lines that were read already, in the order of time: it goes on behind them.
    """

    def __init__(
        self,
        engine: Engine,
        source: str,
        node: str,
        into: queue.Queue[Line],
        *,
        since: float | None,
        tail: int | None = None,
        before: Sequence[Line] = (),
    ) -> None:
        super().__init__(name=f"logs of {node}", daemon=True)
        self._engine, self._source, self._node, self._into = engine, source, node, into
        self._since, self._tail = since, tail
        self._newest: Line | None = None
        self._once = Once(before[0].time if before else "")
        self._closing = threading.Event()
        self._stream: LogStream | None = None
        self._heard = time.monotonic()
        for line in before:
            if line.time and self._once.is_new(line):
                self._passed(line)
        self._once.again()

    def run(self) -> None:
        """Read, and read on after each interruption."""
        while not self._closing.is_set():
            try:
                if self._newest is not None:
                    self._since = max(self._since or 0.0, self._newest.seconds - _OVERLAP)
                params = _params(follow=True, since=self._since, tail=self._tail)
                self._stream = self._engine.frames(f"{self._source}/logs", params)
                self._read(self._stream)
            except EngineError as error:
                if gone(error):
                    return
            self._closing.wait(_RETRY)
            self._once.again()

    def close(self) -> None:
        """End the thread; a line that it has read already is still in the queue."""
        self._closing.set()
        if self._stream is not None:
            self._stream.close()

    def renew(self) -> None:
        """Ask for the log anew: Docker's follow sometimes stays silent about what was said, mostly as a container ends."""
        self._heard = time.monotonic()
        if self._stream is not None:
            self._stream.close()

    @property
    def silence(self) -> float:
        """Seconds since the last line, or since the log was asked for anew."""
        return time.monotonic() - self._heard

    def _read(self, stream: LogStream) -> None:
        for line in _lines(stream, self._node):
            self._heard = time.monotonic()
            # Without a time, it is the engine that says why the stream ends; it is opened again.
            if line.time and self._once.is_new(line):
                self._hand_over(line)
                self._passed(line)
            if self._closing.is_set():
                stream.close()
                return

    def _passed(self, line: Line) -> None:
        if self._newest is None or line.time > self._newest.time:
            self._newest, self._tail = line, None

    def _hand_over(self, line: Line) -> None:
        """Wait for room in the queue, but not for a consumer that has left."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._into.put(line, timeout=1)
                return


def moment(lines: queue.Queue[Line]) -> list[Line]:
    """Return the lines of the next moment, in the order of their times."""
    found = []
    end = time.monotonic() + _WINDOW
    while (left := end - time.monotonic()) > 0:
        try:
            found.append(lines.get(timeout=left))
        except queue.Empty:
            break
    found.sort(key=lambda line: line.time)
    return found


class Once:
    """Tells new lines from those that come again after a reconnect; those of one stream of a task come in the order of time."""

    def __init__(self, floor: str = "") -> None:
        """Lines older than `floor` are not new, whoever wrote them."""
        self._floor = floor
        self._last: dict[tuple[str, int], str] = {}
        self._texts: dict[tuple[str, int], Counter[str]] = {}
        self._again: dict[tuple[str, int], Counter[str]] = {}

    def again(self) -> None:
        """Expect lines that were there before."""
        self._again = {source: texts.copy() for source, texts in self._texts.items()}

    def is_new(self, line: Line) -> bool:
        """Say whether the line was not there before, and remember it."""
        source = (line.task, line.stream)
        last = self._last.get(source, "")
        if line.time < max(last, self._floor):
            return False
        if line.time > last:
            self._last[source], self._texts[source] = line.time, Counter()
            self._again.pop(source, None)
        elif self._again.get(source, Counter())[line.text] > 0:
            self._again[source][line.text] -= 1
            return False
        self._texts[source][line.text] += 1
        return True


def _params(*, follow: bool = False, since: float | None = None, tail: int | None = None) -> dict[str, str]:
    params = {"stdout": "1", "stderr": "1", "timestamps": "1", "details": "1"}
    if follow:
        params["follow"] = "1"
    if since is not None:
        params["since"] = f"{since:.9f}"
    if tail is not None:
        params["tail"] = str(tail)
    return params


def _lines(frames: Iterable[tuple[int, bytes]], node: str) -> Iterator[Line]:
    """Put the pieces of long lines together again: all but the last lack the line's end.

    Where the frames break off, the error passes: a line that is cut off is none, and comes as a whole with the next log.
    """
    pieces: dict[tuple[str, int], Line] = {}
    for stream, data in frames:
        text = data.decode(errors="replace")
        time, _, rest = text.partition(" ")
        details, _, words = rest.partition(" ")
        if not _is_time(time):
            time, details, words = "", "", text
        task = _task(details)
        begun = pieces.pop((task, stream), None) if pieces else None
        if begun is not None:
            time, words = begun.time, begun.text + words
        if words.endswith("\n") or not time:
            yield Line(node, time, task, words.rstrip("\r\n"), stream)
        else:
            pieces[task, stream] = Line(node, time, task, words, stream)
    yield from pieces.values()


def _is_time(word: str) -> bool:
    """Say whether a word is a time as Docker writes it. Asked of ten thousand lines a second, so not by a pattern."""
    return len(word) > 20 and word[4] == word[7] == "-" and word[10] == "T" and word[-1] == "Z"


@lru_cache(1024)
def _task(details: str) -> str:
    return next((item.removeprefix(_TASK) for item in details.split(",") if item.startswith(_TASK)), "")
