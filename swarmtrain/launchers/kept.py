"""What was seen of runs, kept in the user's state directory: Swarm forgets a container's log, and a run that is down has none.

    RUN/events.jsonl   what the notice board said, and what was asked from here; events.N.jsonl came before it
    RUN/NODE.log       what a node printed; NODE.1.log came before it

For reading afterwards only: nothing is ever decided by it. A file has at most LIMIT bytes; of a longer story, the newest
two files are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

from swarmtrain.launchers.base import LogLine
from swarmtrain.wire import ASKED, RENDEZVOUS, Event

LIMIT = 64 * 2**20
EVENTS = "events.jsonl"
_LOCK = "recording"
_TAIL = 64 * 1024
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\S+Z) ")
_HEAD = re.compile(r'\{"event": "[^"]*", "time": (\d+(?:\.\d+)?)')
_RANK = re.compile(r"\[rank (\d+)\] ?")
_OLDER = re.compile(r"\.(\d+)\.(log|jsonl)$")


def state_directory() -> Path:
    """Return the folder that holds the folders of all runs."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "swarmtrain"


def directory(run: str) -> Path:
    """Return the folder that holds `run`'s events and logs, whether or not it is there."""
    return state_directory() / run


def runs() -> list[str]:
    """Return the names of runs of which something is kept, sorted."""
    return sorted({path.parent.name for path in state_directory().glob(f"*/{EVENTS}")})


def events(run: str) -> list[Event]:
    """Return what is kept of the run's notice board, oldest first."""
    files = sorted(directory(run).glob("events*.jsonl"), key=_age)
    return [event for file in files for event in events_in(_lines(file))]


def events_in(lines: Iterable[str], since: float = 0.0) -> Iterator[Event]:
    """Yield the events among `lines` from `since` on, in seconds since the epoch; older ones are not even parsed."""
    for line in lines:
        head = _HEAD.match(line)
        if head and float(head[1]) >= since and (event := Event.from_line(line)):
            yield event


def last_life(found: Sequence[Event]) -> list[Event]:
    """Return the events of the last time that the run was up; those of now, if it is."""
    now = since_down(found)
    return now or since_down(found[:-1]) if found else []


def since_down(found: Sequence[Event]) -> list[Event]:
    """Return the events since the run was last taken down from here, if it was."""
    downs = [number for number, event in enumerate(found) if event.kind == ASKED and event.data.get("what") == "down"]
    return list(found[downs[-1] + 1 :] if downs else found)


def merged(kept: Iterable[Event], live: Iterable[Event]) -> list[Event]:
    """Return the events of both, each once, in the order of their times."""
    return sorted({event.to_line(): event for event in (*kept, *live)}.values(), key=lambda event: event.time)


def has_lines(run: str) -> bool:
    """Say whether any output of the run's nodes is kept."""
    return any(directory(run).glob("node*.log"))


def lines(run: str, *, node: str | None = None, newest: bool = False) -> Iterator[LogLine]:
    """Yield what is kept of the output of all nodes, or of one, in the order of time. Lines without a time come first.

    `newest`: of each node's files the last one only.
    """
    logs: dict[str, list[Path]] = {}
    for path in sorted(directory(run).glob("*.log"), key=_age):
        logs.setdefault(path.name.partition(".")[0], []).append(path)
    logs.pop(RENDEZVOUS, None)
    chosen = {name: files[-1:] if newest else files for name, files in sorted(logs.items()) if node in (None, name)}
    return heapq.merge(*(_log(name, files) for name, files in chosen.items()), key=lambda line: line.time)


def log_line(node: str, text: str, seconds: float = 0.0) -> LogLine:
    """Return a line of a node's log with its rank, if a rank wrote it."""
    match = _RANK.match(text)
    return LogLine(node, text[match.end() :] if match else text, int(match[1]) if match else None, seconds)


def timed(node: str, text: str, before: float = 0.0) -> LogLine:
    """Return a line of a file with the time that it begins with, else that of the line `before` it."""
    match = _TIME.match(text)
    return log_line(node, text[match.end() :], datetime.fromisoformat(match[1]).timestamp()) if match else log_line(node, text, before)


def mark(run: str, what: str, **facts: object) -> None:
    """Note beside the run's events that somebody here has asked for something: up, stop, down. Where it cannot be, it is not."""
    with contextlib.suppress(OSError):
        directory(run).mkdir(parents=True, exist_ok=True)
        with (directory(run) / EVENTS).open("a", encoding="utf-8") as file:
            file.write(Event(ASKED, {"what": what, **facts}).to_line() + "\n")


class Keeper:
    """Appends lines to a run's files, of `limit` bytes each, each line once, as long as no other process does so.

    Where it cannot write, it does nothing.
    """

    def __init__(self, run: str, limit: int = LIMIT) -> None:
        self._directory, self._limit = directory(run), limit
        self._files: dict[str, IO[str]] = {}
        self._until: dict[str, str] = {}
        self._lock: IO[str] | None = None
        self._tried = False
        self._broken = False

    def add(self, node: str, time: str, text: str, *, event: bool = False) -> None:
        """Write one line down; `time` is as Docker writes it, so that text order is time order."""
        name = f"{node}.log"
        try:
            if not self._mine():
                return
            log = self._file(name)
            if time > self._until[name]:
                self._until[name] = time
                log.write(f"{time} {text}\n")
                if event:
                    self._file(EVENTS).write(f"{text}\n")
        except OSError:
            self._broken = True

    def flush(self) -> None:
        """Hand everything to the system, and begin new files where one has grown too long."""
        self._tried = False
        try:
            for name, file in list(self._files.items()):
                file.flush()
                if file.tell() > self._limit:
                    self._files.pop(name).close()
                    stem, _, suffix = name.rpartition(".")
                    (self._directory / name).replace(self._directory / f"{stem}.{0 if name == EVENTS else 1}.{suffix}")
        except OSError:
            self._broken = True

    def close(self) -> None:
        """Close the files, and let others write."""
        self.flush()
        for file in (*self._files.values(), *([self._lock] if self._lock else [])):
            with contextlib.suppress(OSError):
                file.close()

    def _mine(self) -> bool:
        """Say whether this process is the one that writes: two that follow a run see the same lines. Tried once a flush."""
        if self._lock is None and not self._tried and not self._broken:
            self._tried = True
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = (self._directory / _LOCK).open("a", encoding="utf-8")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
            except BlockingIOError:
                lock.close()
        return self._lock is not None and not self._broken

    def _file(self, name: str) -> IO[str]:
        if name not in self._files:
            path = self._directory / name
            self._until[name] = self._until.get(name) or _last_time(path) or _last_time(path.with_suffix(".1.log"))
            self._files[name] = path.open("a", encoding="utf-8")
        return self._files[name]


def _log(node: str, files: list[Path]) -> Iterator[LogLine]:
    seconds = 0.0
    for file in files:
        for text in _lines(file):
            line = timed(node, text, seconds)
            seconds = line.time
            yield line


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            for line in opened:
                yield line.rstrip("\r\n")
    except OSError:
        return


def _age(file: Path) -> tuple[bool, int]:
    """Return a key that sorts older files first: the numbered ones, by number, then the one that still grows."""
    match = _OLDER.search(file.name)
    return (match is None, int(match[1]) if match else 0)


def _last_time(log: Path) -> str:
    """Return the time at the head of the log's last line."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL))
        tail = file.read().decode(errors="replace").splitlines()
    times = [match[1] for line in tail if (match := _TIME.match(line))]
    return times[-1] if times else ""
