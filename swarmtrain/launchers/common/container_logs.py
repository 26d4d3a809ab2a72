"""Reads the logs of services and containers, once or continuously. The continuous reader reconnects, and returns each line only once.

Swarm sends a service's log task by task, and Docker splits lines at 16 KiB. A followed log ends when the connection to the manager is
lost, and can be resumed only from a timestamp, so lines may be repeated. This module joins split lines and drops repeated ones.
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
from swarmtrain.launchers.base import LogLine, ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine, LogStream, is_not_found_error
from swarmtrain.launchers.common.history_store import parse_log_line
from swarmtrain.protocol import RENDEZVOUS_SERVICE, Event

MAX_EXEC_FAILURES = 5
EXEC_HINT = "check that the image is built for the machine's architecture, and shorten long values in runner.env"
# The engine's message in the log of a container whose program the kernel cannot start. The exit code alone does not show it.
_EXEC_FAILURE_PATTERN = re.compile(
    r"exec /\S+: (argument list too long|exec format error|no such file or directory|permission denied)|"
    r"standard_init_linux\.go:\d+: exec user process caused: .+"
)
_TASK_ID_PREFIX = "com.docker.swarm.task.id="
_RETRY_SECONDS = 0.5
# Lines that arrive within this time are sorted by their timestamps.
_BATCH_SECONDS = 0.2
# Clocks of nodes differ, and the lines of a service's tasks may come from several nodes.
_OVERLAP_SECONDS = 60.0


@dataclass(slots=True)  # not frozen: 10,000 per second are created, and creating a frozen instance takes twice as long
class ContainerLogLine:
    """A line of a service's or container's log: its timestamp, the task that wrote it, and its text.

    `stream` is 1 for stdout, 2 for stderr. The timestamp is in Docker's format, whose lexicographic order is
    chronological.
    """

    node: str
    time: str
    task: str
    text: str
    stream: int = 1

    @property
    def timestamp(self) -> float:
        """Time of the line in seconds since the epoch; 0 for a line without a timestamp."""
        return datetime.fromisoformat(self.time).timestamp() if self.time else 0.0

    def parse_event(self) -> Event | None:
        """Return the coordinator's event that the line contains, or None."""
        return Event.from_line(self.text) if self.node == RENDEZVOUS_SERVICE else None

    def to_log_line(self) -> LogLine:
        """Return the line as a LogLine, whose rank is None if no rank wrote it."""
        return parse_log_line(self.node, self.text, self.timestamp)


def read_log_lines(
    engine: DockerEngine,
    api_path: str,
    node: str,
    *,
    tail: int | None = None,
    since: float | None = None,
    report_problem: ProgressReporter | None = None,
) -> list[ContainerLogLine]:
    """Return the lines of the log of `api_path` (/services/ID or /containers/ID) that are still available, ordered by time.

    With `tail`, only the last `tail` lines are returned. Lines on a machine that the manager cannot reach are missing; `report_problem` is
    then called with a message. Raises EngineError if the manager does not answer.
    """
    lines: list[ContainerLogLine] = []
    try:
        for line in _join_log_frames(engine.open_log_stream(f"{api_path}/logs", _build_log_query_params(tail=tail, since=since)), node):
            if line.time:
                lines.append(line)
            elif report_problem:  # a line without a timestamp is the engine's message about a machine that it cannot reach
                report_problem(f"the log of {node} is incomplete: {line.text}")
    except EngineError as error:
        if error.status is not None:
            raise
        engine.get("/version")  # raises if the manager does not answer at all
    lines.sort(key=lambda line: line.time)
    return lines if tail is None else lines[max(0, len(lines) - tail) :]


def read_exec_failure(engine: DockerEngine, api_path: str, node: str, attempts: int = MAX_EXEC_FAILURES) -> str:
    """Return why the kernel could not start the program in the last `attempts` attempts, by the log of `api_path`; empty if it could.

    Engines restart such containers, although the next attempt fails in the same way. Their agent never runs, so that the coordinator does
    not hear of them, and counts no restart. Raises EngineError if the engine does not answer.
    """
    lines = [line.text.strip() for line in read_log_lines(engine, api_path, node, tail=attempts)]
    return lines[-1] if lines and all(map(_EXEC_FAILURE_PATTERN.fullmatch, lines)) else ""


class LogReader(threading.Thread):
    """Thread that follows the log of `api_path` (/services/ID or /containers/ID), and puts its lines into a queue.

    The thread ends when it is closed, or when the service or container has been removed.
    `previous_lines` are lines that were read before, ordered by time; the reader puts only newer lines into the queue.
    """

    def __init__(
        self,
        engine: DockerEngine,
        api_path: str,
        node: str,
        output_queue: queue.Queue[ContainerLogLine],
        *,
        since: float | None,
        tail: int | None = None,
        previous_lines: Sequence[ContainerLogLine] = (),
    ) -> None:
        super().__init__(name=f"logs of {node}", daemon=True)
        self._engine, self._source, self._node, self._output_queue = engine, api_path, node, output_queue
        self._since, self._tail = since, tail
        self._newest_line: ContainerLogLine | None = None
        self._deduplicator = LineDeduplicator(previous_lines[0].time if previous_lines else "")
        self._closing = threading.Event()
        self._stream: LogStream | None = None
        self._last_line_at = time.monotonic()
        for line in previous_lines:
            if line.time and self._deduplicator.is_new(line):
                self._remember_newest_line(line)
        self._deduplicator.start_replay()

    def run(self) -> None:
        """Read the log, and reconnect after each interruption."""
        while not self._closing.is_set():
            try:
                if self._newest_line is not None:
                    self._since = max(self._since or 0.0, self._newest_line.timestamp - _OVERLAP_SECONDS)
                params = _build_log_query_params(follow=True, since=self._since, tail=self._tail)
                self._stream = self._engine.open_log_stream(f"{self._source}/logs", params)
                self._read_stream(self._stream)
            except EngineError as error:
                if is_not_found_error(error):
                    return
            self._closing.wait(_RETRY_SECONDS)
            self._deduplicator.start_replay()

    def close(self) -> None:
        """End the reader thread. Lines that it has already read stay in the queue."""
        self._closing.set()
        if self._stream is not None:
            self._stream.close()

    def reconnect(self) -> None:
        """Request the log again: Docker's follow mode sometimes withholds lines, mostly when a container ends."""
        self._last_line_at = time.monotonic()
        if self._stream is not None:
            self._stream.close()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the last line was received, or since the last request for the log, whichever is later."""
        return time.monotonic() - self._last_line_at

    def _read_stream(self, stream: LogStream) -> None:
        for line in _join_log_frames(stream, self._node):
            self._last_line_at = time.monotonic()
            # A line without a timestamp is the engine's reason for ending the stream, which is then opened again.
            if line.time and self._deduplicator.is_new(line):
                self._enqueue_line(line)
                self._remember_newest_line(line)
            if self._closing.is_set():
                stream.close()
                return

    def _remember_newest_line(self, line: ContainerLogLine) -> None:
        if self._newest_line is None or line.time > self._newest_line.time:
            self._newest_line, self._tail = line, None

    def _enqueue_line(self, line: ContainerLogLine) -> None:
        """Put the line into the queue. If the queue is full, block until it has space or the reader is closed."""
        while not self._closing.is_set():
            with contextlib.suppress(queue.Full):
                self._output_queue.put(line, timeout=1)
                return


def take_line_batch(line_queue: queue.Queue[ContainerLogLine]) -> list[ContainerLogLine]:
    """Return the lines that arrive within the next _BATCH_SECONDS, ordered by time."""
    batch = []
    deadline = time.monotonic() + _BATCH_SECONDS
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            batch.append(line_queue.get(timeout=remaining))
        except queue.Empty:
            break
    batch.sort(key=lambda line: line.time)
    return batch


class LineDeduplicator:
    """Distinguishes new log lines from those that are repeated after a reconnect.

    The lines of one stream of a task must be passed in chronological order.
    """

    def __init__(self, earliest_timestamp: str = "") -> None:
        """Treat lines of all tasks with a timestamp before `earliest_timestamp` as already seen."""
        self._floor = earliest_timestamp
        self._last_times: dict[tuple[str, int], str] = {}
        self._texts_at_last_time: dict[tuple[str, int], Counter[str]] = {}
        self._expected_repeats: dict[tuple[str, int], Counter[str]] = {}

    def start_replay(self) -> None:
        """Start a replay, in which lines that were seen before may be repeated."""
        self._expected_repeats = {source: texts.copy() for source, texts in self._texts_at_last_time.items()}

    def is_new(self, line: ContainerLogLine) -> bool:
        """Return whether the line was not seen before, and remember the line."""
        source = (line.task, line.stream)
        last_time = self._last_times.get(source, "")
        if line.time < max(last_time, self._floor):
            return False
        if line.time > last_time:
            self._last_times[source], self._texts_at_last_time[source] = line.time, Counter()
            self._expected_repeats.pop(source, None)
        elif self._expected_repeats.get(source, Counter())[line.text] > 0:
            self._expected_repeats[source][line.text] -= 1
            return False
        self._texts_at_last_time[source][line.text] += 1
        return True


def _build_log_query_params(*, follow: bool = False, since: float | None = None, tail: int | None = None) -> dict[str, str]:
    params = {"stdout": "1", "stderr": "1", "timestamps": "1", "details": "1"}
    if follow:
        params["follow"] = "1"
    if since is not None:
        params["since"] = f"{since:.9f}"
    if tail is not None:
        params["tail"] = str(tail)
    return params


def _join_log_frames(frames: Iterable[tuple[int, bytes]], node: str) -> Iterator[ContainerLogLine]:
    """Join the frames of long log lines, which Docker splits: only the last frame of a line ends with a newline.

    If the stream is interrupted, the error propagates and the incomplete line is dropped: the next log request returns it in full.
    """
    partial_lines: dict[tuple[str, int], ContainerLogLine] = {}
    for stream, data in frames:
        text = data.decode(errors="replace")
        time, _, remainder = text.partition(" ")
        details, _, message = remainder.partition(" ")
        if not _is_docker_timestamp(time):
            time, details, message = "", "", text
        task = _parse_task_id(details)
        partial = partial_lines.pop((task, stream), None) if partial_lines else None
        if partial is not None:
            time, message = partial.time, partial.text + message
        if message.endswith("\n") or not time:
            yield ContainerLogLine(node, time, task, message.rstrip("\r\n"), stream)
        else:
            partial_lines[task, stream] = ContainerLogLine(node, time, task, message, stream)
    yield from partial_lines.values()


def _is_docker_timestamp(word: str) -> bool:
    """Return whether a word is a timestamp in Docker's format.

    It is called for 10,000 lines per second, so it does not use a regular expression, which would be slower.
    """
    return len(word) > 20 and word[4] == word[7] == "-" and word[10] == "T" and word[-1] == "Z"


@lru_cache(1024)
def _parse_task_id(details: str) -> str:
    return next((item.removeprefix(_TASK_ID_PREFIX) for item in details.split(",") if item.startswith(_TASK_ID_PREFIX)), "")
