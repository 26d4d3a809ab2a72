"""Reads the files of a local run while they grow: yields the coordinator's events and the nodes' output as updates."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from swarmtrain.launchers.base import LogLine, RunUpdate, TaskState
from swarmtrain.launchers.common.end_of_run import StopDetector
from swarmtrain.launchers.common.history_store import parse_events, parse_timestamped_log_line
from swarmtrain.launchers.common.local_run_folder import LocalRunFolder
from swarmtrain.protocol import EVENT_OUTCOME, Event

_POLL_SECONDS = 0.1
_TRAILING_LINES_SECONDS = 5.0  # seconds after the outcome in which nodes may still print their last lines


class FileTail:
    """A growing text file, read incrementally. If the file is truncated, it is read again from the start."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self.offset = path.stat().st_size if from_end and path.exists() else 0
        self.partial_line = b""

    def read_new_lines(self) -> list[str]:
        """Return the complete lines that were added to the file since the last call."""
        try:
            if self.path.stat().st_size < self.offset:
                self.offset, self.partial_line = 0, b""
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:
            return []
        self.offset += len(data)
        *complete_lines, self.partial_line = (self.partial_line + data).split(b"\n")
        return [line.decode(errors="replace") for line in complete_lines]


def read_events(run_folder: LocalRunFolder, since: float | None = None, tail: int | None = None) -> list[Event]:
    """Return the coordinator's events so far, from `since` on (seconds since the epoch), and of these only the last `tail`."""
    lines = FileTail(run_folder.events_path).read_new_lines()
    return list(parse_events(lines[max(0, len(lines) - tail) :] if tail is not None else lines, since or 0.0))


class NodeLogTail(FileTail):
    """The growing log file of a node's output."""

    def __init__(self, node: str, path: Path, *, from_end: bool = False) -> None:
        super().__init__(path, from_end=from_end)
        self.node, self.last_timestamp = node, 0.0

    def read_new_log_lines(self) -> list[LogLine]:
        """Return the complete lines that were added to the log since the last call, with their times."""
        log_lines = []
        for text in self.read_new_lines():
            log_lines.append(parse_timestamped_log_line(self.node, text, self.last_timestamp))
            self.last_timestamp = log_lines[-1].time
        return log_lines


def stream_logs(run_folder: LocalRunFolder, *, follow: bool, tail: int | None, since: float | None, node: str | None) -> Iterator[LogLine]:
    """Yield the output of all nodes, or of `node`; with `follow`, until no node of the run has been running for 10 s."""
    readers: dict[str, NodeLogTail] = {}
    stop_detector = StopDetector()
    follow = follow and run_folder.has_live_nodes
    while True:
        has_stopped = stop_detector.update(is_running=run_folder.has_live_nodes)
        batches = []
        for name in (node_name for node_name in run_folder.list_process_names() if node in (None, node_name)):
            is_new = name not in readers
            lines = readers.setdefault(name, NodeLogTail(name, run_folder.get_log_path(name))).read_new_log_lines()
            lines = [line for line in lines if line.time >= (since or 0.0)]
            batches.append(lines[max(0, len(lines) - tail) :] if is_new and tail is not None else lines)
        yield from heapq.merge(*batches, key=lambda line: line.time)
        if not follow or has_stopped:
            return
        time.sleep(_POLL_SECONDS)


def watch_run(run_folder: LocalRunFolder, list_tasks: Callable[[], list[TaskState]]) -> Iterator[RunUpdate]:
    """Yield all events of the run, and its new output and task states.

    Ends after the outcome and the last lines of output, at the run's removal, or when no node has been running for 10 s.
    """
    events_tail = FileTail(run_folder.events_path)
    readers = {name: NodeLogTail(name, run_folder.get_log_path(name), from_end=True) for name in run_folder.list_process_names()}
    states: dict[str, TaskState] = {}
    outcome_at: float | None = None
    stop_detector = StopDetector()
    while True:
        has_stopped = stop_detector.update(is_running=run_folder.has_live_nodes)
        exists, has_outcome = run_folder.exists, outcome_at is not None
        task_states = list_tasks() if exists else []
        for state in task_states:
            if states.get(state.node) != state:
                states[state.node] = state
                yield state
        for name in run_folder.list_process_names():
            yield from readers.setdefault(name, NodeLogTail(name, run_folder.get_log_path(name))).read_new_log_lines()
        for line in events_tail.read_new_lines():
            if event := Event.from_line(line):
                outcome_at = outcome_at or (time.monotonic() if event.kind == EVENT_OUTCOME else None)
                yield event
        ended = all(state.state in ("complete", "shutdown") for state in task_states)
        if not exists or has_stopped or (has_outcome and (ended or time.monotonic() - (outcome_at or 0.0) > _TRAILING_LINES_SECONDS)):
            return
        time.sleep(_POLL_SECONDS)
