"""History of runs in the user's state directory, needed because Swarm deletes a container's log, and a removed run has no log.

    RUN/events.jsonl   the coordinator's events, and the operations requested on this machine; events.N.jsonl is older
    RUN/NODE.log       a node's output; NODE.1.log is older
    RUN/summary.json   summary of the events, for the list of runs
    RUN/code.diff      diff of the project against its git commit at the last deploy

The history is only shown to users: no decision depends on it. Files are rotated at MAX_FILE_BYTES bytes; the newest two files
are kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import IO, Any

from swarmtrain import __version__
from swarmtrain.atomic_file import write_text_atomically
from swarmtrain.launchers.base import LogLine
from swarmtrain.protocol import EVENT_OPERATION, EVENT_PROGRESS, EVENT_USAGE, RENDEZVOUS_SERVICE, Event

MAX_FILE_BYTES = 64 * 2**20
EVENTS_FILE, DIFF_FILE = "events.jsonl", "code.diff"
_SUMMARY_FILE = "summary.json"
_LOCK_FILE = "history.lock"
_TAIL_BYTES = 64 * 1024
_TIME_PATTERN = re.compile(r"(\d{4}-\d\d-\d\dT\S+Z) ")
_EVENT_HEAD_PATTERN = re.compile(r'\{"event": "[^"]*", "time": (\d+(?:\.\d+)?)')
_PROGRESS_LINE_PREFIX, _USAGE_LINE_PREFIX = f'{{"event": "{EVENT_PROGRESS}"', f'{{"event": "{EVENT_USAGE}"'
_RANK_PATTERN = re.compile(r"\[rank (\d+)\] ?")
_ROTATED_PATTERN = re.compile(r"\.(\d+)\.(log|jsonl)$")


def resolve_state_directory() -> Path:
    """Return swarmtrain's state directory, which contains a folder for each run: by default ~/.local/state/swarmtrain."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "swarmtrain"


def resolve_run_folder(run: str) -> Path:
    """Return the folder of `run`'s events and logs, which need not exist."""
    return resolve_state_directory() / run


def list_recorded_runs() -> list[str]:
    """Return the names of runs with events recorded on this machine, sorted."""
    return sorted({path.parent.name for path in resolve_state_directory().glob(f"*/{EVENTS_FILE}")})


def load_events(run: str) -> list[Event]:
    """Return the run's recorded events, oldest first."""
    return list(parse_events(_read_event_lines(run)))


def load_main_events(run: str) -> list[Event]:
    """Return the run's recorded events without resource usage, and without each progress event that progress or usage follows.

    A long run has hundreds of thousands of these, whose lines are not parsed.
    """
    return list(parse_events(_drop_routine_lines(_read_event_lines(run))))


def was_taken_down(run: str) -> bool:
    """Return whether the last event that is recorded of the run is its removal from this machine."""
    events = load_events(run)
    return bool(events) and events[-1].kind == EVENT_OPERATION and events[-1].data.get("operation") == "down"


def load_summary(run: str) -> dict[str, Any] | None:
    """Return the stored summary of the run; None if there is none, or if it was made from other events or by another version."""
    try:
        stored = json.loads((resolve_run_folder(run) / _SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_current = isinstance(stored, dict) and stored.get("source") == _describe_event_files(run)
    return stored.get("summary") if is_current else None


def save_summary(run: str, summary: Mapping[str, Any]) -> None:
    """Store the summary of the run's present events. An OSError is ignored."""
    text = json.dumps({"source": _describe_event_files(run), "summary": summary})
    with contextlib.suppress(OSError):
        write_text_atomically(resolve_run_folder(run) / _SUMMARY_FILE, text)


def _describe_event_files(run: str) -> list[Any]:
    """Return a value that changes with the files of the run's events, and with the version of swarmtrain."""
    files = {path.name: path.stat() for path in resolve_run_folder(run).glob("events*.jsonl")}
    return [__version__, *([name, status.st_size, status.st_mtime_ns] for name, status in sorted(files.items()))]


def parse_events(lines: Iterable[str], since: float = 0.0) -> Iterator[Event]:
    """Yield the events in `lines` from `since` on, in seconds since the epoch; older events are skipped without parsing them."""
    for line in lines:
        head = _EVENT_HEAD_PATTERN.match(line)
        if head and float(head[1]) >= since and (event := Event.from_line(line)):
            yield event


def select_last_deployment_events(events: Sequence[Event]) -> list[Event]:
    """Return the events of the run's current deployment, or of its last deployment if the run is down."""
    current = select_events_since_teardown(events)
    return current or select_events_since_teardown(events[:-1]) if events else []


def select_events_since_teardown(events: Sequence[Event]) -> list[Event]:
    """Return the events since the run was last taken down from this machine; all events if it was never taken down."""
    teardown_indices = [
        index for index, event in enumerate(events) if event.kind == EVENT_OPERATION and event.data.get("operation") == "down"
    ]
    return list(events[teardown_indices[-1] + 1 :] if teardown_indices else events)


def merge_events(recorded_events: Iterable[Event], live_events: Iterable[Event]) -> list[Event]:
    """Return the events of both lists, without duplicates, ordered by time."""
    return sorted({event.to_line(): event for event in (*recorded_events, *live_events)}.values(), key=lambda event: event.time)


def has_logs(run: str) -> bool:
    """Return whether any output of the run's nodes is recorded on this machine."""
    return any(resolve_run_folder(run).glob("node*.log"))


def load_log_lines(run: str, *, node: str | None = None, newest_only: bool = False) -> Iterator[LogLine]:
    """Yield the recorded output of all nodes, or of `node`, ordered by time. Lines without a timestamp come first.

    With `newest_only`, only the newest file of each node is read.
    """
    logs: dict[str, list[Path]] = {}
    for path in sorted(resolve_run_folder(run).glob("*.log"), key=_get_age_sort_key):
        logs.setdefault(path.name.partition(".")[0], []).append(path)
    logs.pop(RENDEZVOUS_SERVICE, None)
    selected = {name: files[-1:] if newest_only else files for name, files in sorted(logs.items()) if node in (None, name)}
    return heapq.merge(*(_read_node_log(name, files) for name, files in selected.items()), key=lambda line: line.time)


def parse_log_line(node: str, text: str, timestamp: float = 0.0) -> LogLine:
    """Return the text of one line of a node's log as a LogLine, with its rank if a rank wrote it."""
    match = _RANK_PATTERN.match(text)
    return LogLine(node, text[match.end() :] if match else text, int(match[1]) if match else None, timestamp)


def parse_timestamped_log_line(node: str, text: str, previous_timestamp: float = 0.0) -> LogLine:
    """Return a line of a log file as a LogLine, with the timestamp at the start of the line.

    Without a timestamp in the line, `previous_timestamp` (seconds since the epoch) is used.
    """
    match = _TIME_PATTERN.match(text)
    return (
        parse_log_line(node, text[match.end() :], datetime.fromisoformat(match[1]).timestamp())
        if match
        else parse_log_line(node, text, previous_timestamp)
    )


def record_operation(run: str, operation: str, **details: object) -> None:
    """Record in the run's events that `operation` (up, stop or down) was requested on this machine. An OSError is ignored."""
    with contextlib.suppress(OSError):
        resolve_run_folder(run).mkdir(parents=True, exist_ok=True)
        with (resolve_run_folder(run) / EVENTS_FILE).open("a", encoding="utf-8") as file:
            file.write(Event(EVENT_OPERATION, {"operation": operation, **details}).to_line() + "\n")


def save_git_diff(run: str, diff: str) -> None:
    """Save the diff of the user's project against its git commit, replacing the previous diff. An OSError is ignored."""
    with contextlib.suppress(OSError):
        if diff:
            (resolve_run_folder(run) / DIFF_FILE).write_text(diff, encoding="utf-8")
        else:
            (resolve_run_folder(run) / DIFF_FILE).unlink(missing_ok=True)


class HistoryWriter:
    """Writer that appends lines to the history files of a run, which are rotated at `max_file_bytes` bytes.

    Each line is written once, and only while no other process records this run. If a file cannot be written, nothing is recorded.
    """

    def __init__(self, run: str, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._directory, self._limit = resolve_run_folder(run), max_file_bytes
        self._files: dict[str, IO[str]] = {}
        self._last_times: dict[str, str] = {}
        self._lock: IO[str] | None = None
        self._lock_tried = False
        self._failed = False

    def append_line(self, node: str, time: str, text: str, *, is_event: bool = False) -> None:
        """Append one line to the log of `node`, and with `is_event` also to the run's events.

        A line that is not newer than the last one is skipped. `time` is a timestamp in Docker's format, whose lexicographic order is
        chronological.
        """
        name = f"{node}.log"
        try:
            if not self._try_lock():
                return
            log_file = self._open_file(name)
            if time > self._last_times[name]:
                self._last_times[name] = time
                log_file.write(f"{time} {text}\n")
                if is_event:
                    self._open_file(EVENTS_FILE).write(f"{text}\n")
        except OSError:
            self._failed = True

    def flush(self) -> None:
        """Flush all files, and rotate those that have grown beyond the limit."""
        self._lock_tried = False
        try:
            for name, file in list(self._files.items()):
                file.flush()
                if file.tell() > self._limit:
                    self._files.pop(name).close()
                    stem, _, suffix = name.rpartition(".")
                    (self._directory / name).replace(self._directory / f"{stem}.{0 if name == EVENTS_FILE else 1}.{suffix}")
        except OSError:
            self._failed = True

    def close(self) -> None:
        """Flush and close the files, and release the lock for other processes."""
        self.flush()
        for file in (*self._files.values(), *([self._lock] if self._lock else [])):
            with contextlib.suppress(OSError):
                file.close()

    def _try_lock(self) -> bool:
        """Return whether this process may write to the files, that is, holds their lock or can acquire it now.

        Two processes that follow one run read the same lines, so only one of them records. The lock is tried once per flush.
        """
        if self._lock is None and not self._lock_tried and not self._failed:
            self._lock_tried = True
            self._directory.mkdir(parents=True, exist_ok=True)
            lock = (self._directory / _LOCK_FILE).open("a", encoding="utf-8")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
            except BlockingIOError:
                lock.close()
        return self._lock is not None and not self._failed

    def _open_file(self, name: str) -> IO[str]:
        if name not in self._files:
            path = self._directory / name
            self._last_times[name] = (
                self._last_times.get(name) or _read_last_timestamp(path) or _read_last_timestamp(path.with_suffix(".1.log"))
            )
            self._files[name] = path.open("a", encoding="utf-8")
        return self._files[name]


def _read_node_log(node: str, files: list[Path]) -> Iterator[LogLine]:
    previous_timestamp = 0.0
    for file in files:
        for text in _read_file_lines(file):
            line = parse_timestamped_log_line(node, text, previous_timestamp)
            previous_timestamp = line.time
            yield line


def _read_event_lines(run: str) -> Iterator[str]:
    for file in sorted(resolve_run_folder(run).glob("events*.jsonl"), key=_get_age_sort_key):
        yield from _read_file_lines(file)


def _drop_routine_lines(lines: Iterable[str]) -> Iterator[str]:
    for line, next_line in pairwise(chain(lines, [""])):
        is_superseded = line.startswith(_PROGRESS_LINE_PREFIX) and next_line.startswith((_PROGRESS_LINE_PREFIX, _USAGE_LINE_PREFIX))
        if not is_superseded and not line.startswith(_USAGE_LINE_PREFIX):
            yield line


def _read_file_lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                yield line.rstrip("\r\n")
    except OSError:
        return


def _get_age_sort_key(file: Path) -> tuple[bool, int]:
    """Return a sort key that puts older files first: rotated files by their number, then the file that is still written."""
    match = _ROTATED_PATTERN.search(file.name)
    return (match is None, int(match[1]) if match else 0)


def _read_last_timestamp(log: Path) -> str:
    """Return the timestamp of the log file's last line that starts with one; empty if there is no such line."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        tail = file.read().decode(errors="replace").splitlines()
    times = [match[1] for line in tail if (match := _TIME_PATTERN.match(line))]
    return times[-1] if times else ""
