"""Record the output of a run's containers in the user's state directory: Swarm deletes a container's log after five restarts."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from swarmtrain.atomic_file import open_private_file
from swarmtrain.launchers.common.container_logs import ContainerLogLine
from swarmtrain.launchers.common.history_store import EVENTS_FILE, TIMESTAMP_PATTERN, RecordedRun
from swarmtrain.protocol import EVENT_USAGE

MAX_FILE_BYTES = 64 * 2**20
_LOCK_FILE = "history.lock"
_TAIL_BYTES = 64 * 1024


class LogRecorder:
    """Recorder of a run's output: appends lines to NODE.log, and the coordinator's events also to events.jsonl.

    Lines that an earlier recorder has written are skipped.
    """

    def __init__(self, run: RecordedRun) -> None:
        self._writer = HistoryWriter(run)

    def append_line(self, line: ContainerLogLine) -> None:
        """Append one line to the recorded files. Lines without a timestamp and resource usage events are skipped.

        A write error is ignored.
        """
        event = line.parse_event()
        # A node's resource usage is of interest only while it is current.
        if line.time and not (event and event.kind == EVENT_USAGE):
            self._writer.append_line(line.node, line.time, line.text, is_event=event is not None)

    def flush(self) -> None:
        """Flush the recorded files."""
        self._writer.flush()

    def close(self) -> None:
        """Close the recorded files."""
        self._writer.close()


def record_log_lines(run: RecordedRun, lines: Iterable[ContainerLogLine]) -> None:
    """Record those of `lines` that are not recorded yet."""
    recorder = LogRecorder(run)
    for line in lines:
        recorder.append_line(line)
    recorder.close()


class HistoryWriter:
    """Writer that appends lines to the history files of a run. They are rotated at `max_file_bytes` bytes; the newest two are kept.

    Each line is written once, and only while no other process records this run. If a file cannot be written, nothing is recorded.
    """

    def __init__(self, run: RecordedRun, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._run, self._directory, self._limit = run, run.folder, max_file_bytes
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
            self._run.create_folder()
            lock = open_private_file(self._directory / _LOCK_FILE, "a")
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
            self._files[name] = open_private_file(path, "a")
        return self._files[name]


def _read_last_timestamp(log: Path) -> str:
    """Return the timestamp of the log file's last line that starts with one; empty if there is no such line."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        tail = file.read().decode(errors="replace").splitlines()
    times = [match[1] for line in tail if (match := TIMESTAMP_PATTERN.match(line))]
    return times[-1] if times else ""
