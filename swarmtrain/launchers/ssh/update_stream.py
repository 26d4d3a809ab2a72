"""Stream of updates from the hosts of a run: one thread polls each host, and their updates are merged."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from swarmtrain.errors import HostError
from swarmtrain.launchers.base import LogLine, ProgressReporter, RunUpdate, TaskState
from swarmtrain.launchers.common.end_of_run import StopDetector
from swarmtrain.launchers.common.history_store import parse_events, parse_timestamped_log_line
from swarmtrain.launchers.ssh.host_connections import Host, HostGroup
from swarmtrain.launchers.ssh.run_index import RunRecord
from swarmtrain.protocol import EVENT_OUTCOME, RENDEZVOUS_SERVICE, Event
from swarmtrain.remote.run_folder import EVENTS_FILE

_LONG_POLL_SECONDS = 2.0
_RETRY_SECONDS = 2.0
_TRAILING_LINES_SECONDS = 5.0  # seconds after the outcome in which nodes may still print their last lines
_FINAL_STATES = ("complete", "shutdown")
_MAX_SILENCE_SECONDS = 60.0
"""Seconds after which the nodes of a host that does not answer count as stopped, if another host answers."""


def build_task_states(record: RunRecord, host: str, update: dict[str, Any] | HostError) -> list[TaskState]:
    """Return the TaskState of each process of the run on `host`, by the response of its agent, or the error if it did not respond."""
    if isinstance(update, HostError):
        names = [name for name, process_host in record.hosts_by_process.items() if process_host == host]
        return [TaskState(name, record.get_displayed_host(name), "unreachable", update.message) for name in names]
    return [_build_task_state(name, record.get_displayed_host(name), state) for name, state in update["states"].items()]


def _build_task_state(name: str, host: str, process_state: dict[str, Any] | None) -> TaskState:
    if process_state is None:
        return TaskState(name, host, "starting")
    code = process_state["exit_code"]
    reason = process_state.get("reason") or (f"exit code {code}" if code else "")
    return TaskState(name, process_state.get("host", host), process_state["state"], reason, code)


def read_events(host: Host, run: str, since: float | None = None, tail: int | None = None) -> list[Event]:
    """Return the coordinator's events from `since` on (seconds since the epoch), of the last `tail` lines. Raises HostError."""
    return list(parse_events(read_file_lines(host, run, EVENTS_FILE, tail), since or 0.0))


def read_log_lines(host: Host, run: str, tail: int | None = None) -> list[LogLine]:
    """Return the output of a host's processes, ordered by time; with `tail`, the last `tail` lines of each. Raises HostError."""
    return _parse_log_lines(_read_files(host, run, None, tail), {})


def read_file_lines(host: Host, run: str, file_name: str, tail: int | None = None) -> list[str]:
    """Return the lines of one file in the run's folder; with `tail`, only the last ones. Raises HostError."""
    return [line for _, line in _read_files(host, run, [file_name], tail)]


def _read_files(host: Host, run: str, file_names: list[str] | None, tail: int | None) -> list[tuple[str, str]]:
    """Return (file name, line) for each line in the run's files on a host."""
    offsets: dict[str, int] = {}
    file_lines: list[tuple[str, str]] = []
    while True:
        update = host.call_agent("read_new_lines", run=run, offsets=offsets, file_names=file_names, tail=tail)
        file_lines += [(name, line) for name, text in update["files"].items() for line in text.split("\n")]
        offsets |= update["offsets"]
        if not update["has_more"]:
            return file_lines


def _parse_log_lines(file_lines: list[tuple[str, str]], last_timestamp_by_node: dict[str, float]) -> list[LogLine]:
    lines = []
    for name, text in file_lines:
        if name != EVENTS_FILE:
            node = name.removesuffix(".log")
            lines.append(parse_timestamped_log_line(node, text, last_timestamp_by_node.get(node, 0.0)))
            last_timestamp_by_node[node] = lines[-1].time
    return sorted(lines, key=lambda line: line.time)


class HostPoller(threading.Thread):
    """Thread that polls one host for updates until it is stopped, and puts them into `output_queue`."""

    def __init__(self, host: Host, run: str, output_queue: queue.Queue[tuple[str, dict[str, Any] | Exception]], tail: int | None) -> None:
        super().__init__(daemon=True)
        self.host, self.run_name, self.output_queue, self.tail = host, run, output_queue, tail
        self.running = threading.Event()
        self.running.set()

    def run(self) -> None:
        """Poll the host until `running` is cleared."""
        offsets: dict[str, int] = {}
        wait = 0.0
        while self.running.is_set():
            try:
                update = self.host.call_agent(
                    "poll_changes", run=self.run_name, offsets=offsets, wait_seconds=wait, tail=None if offsets else self.tail
                )
            except HostError as error:
                self.output_queue.put((self.host.name, error))
                time.sleep(_RETRY_SECONDS)
                continue
            except Exception as error:  # noqa: BLE001  # the thread that reads the queue raises it
                self.output_queue.put((self.host.name, error))
                return
            offsets |= update["offsets"]
            self.output_queue.put((self.host.name, update))
            wait = 0.0 if update["has_more"] else _LONG_POLL_SECONDS


class HostUpdateStream:
    """Poll all hosts of a run, and merge their updates.

    Iterating yields (host, update or HostError), or None after 0.2 s without an update. Raises other errors of a host.
    """

    def __init__(self, host_group: HostGroup, run: str, tail: int | None) -> None:
        self._output_queue: queue.Queue[tuple[str, dict[str, Any] | Exception]] = queue.Queue()
        self._pollers = [HostPoller(host, run, self._output_queue, tail) for host in host_group.hosts.values()]
        self._host_group = host_group

    def __enter__(self) -> HostUpdateStream:
        for poller in self._pollers:
            poller.start()
        return self

    def __exit__(self, *_: object) -> None:
        for poller in self._pollers:
            poller.running.clear()

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any] | HostError] | None]:
        while True:
            try:
                host, update = self._output_queue.get(timeout=0.2)
            except queue.Empty:
                yield None
                continue
            if isinstance(update, Exception) and not isinstance(update, HostError):
                raise update
            yield host, update


def watch_run(record: RunRecord, host_group: HostGroup, run: str) -> Iterator[RunUpdate]:
    """Yield all events of the run, and its new output and task states.

    Ends after the outcome and the last lines of output, at the run's removal, or when no node has been running on any host for 10 s.
    """
    states: dict[str, TaskState] = {}
    times: dict[str, float] = {}
    outcome_at: float | None = None
    live_nodes = _LiveNodes(host_group.hosts)
    with host_group, HostUpdateStream(host_group, run, 0) as stream:
        for message in stream:
            if live_nodes.update(message):
                return
            if message is not None:
                host, update = message
                for state in build_task_states(record, host, update):
                    if states.get(state.node) != state:
                        states[state.node] = state
                        yield state
                if isinstance(update, HostError):
                    continue
                if not update["exists"]:
                    if host == record.coordinator_host:
                        return
                    continue
                file_lines = [(name, line) for name, text in update["files"].items() for line in text.split("\n")]
                yield from _parse_log_lines(file_lines, times)
                for name, line in file_lines:
                    if name == EVENTS_FILE and (event := Event.from_line(line)):
                        outcome_at = outcome_at or (time.monotonic() if event.kind == EVENT_OUTCOME else None)
                        yield event
            if outcome_at is not None:
                reachable_states = [state for state in states.values() if state.state != "unreachable"]
                ended = bool(reachable_states) and all(state.state in _FINAL_STATES for state in reachable_states)
                if ended or time.monotonic() - outcome_at > _TRAILING_LINES_SECONDS:
                    return


class _LiveNodes:
    """The hosts on which a node of the run may be running: what they last answered, for up to 60 s, or until any host answers again."""

    def __init__(self, hosts: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._stop_detector = clock, StopDetector(clock)
        self._is_running = dict.fromkeys(hosts, True)
        self._answered_at = dict.fromkeys(self._is_running, clock())

    @property
    def may_run(self) -> bool:
        """Whether a node may be running on any host."""
        return any(self._is_running.values())

    def update(self, message: tuple[str, dict[str, Any] | HostError] | None) -> bool:
        """Return whether no node has been running for 10 s, with the update of a host in `message`."""
        host, update = message or ("", None)
        if update is not None and not isinstance(update, HostError):
            self._is_running[host] = any(name != RENDEZVOUS_SERVICE for name in update["alive"]) or update["has_more"]
            self._answered_at[host] = self._clock()
        newest_answer = max(self._answered_at.values())
        running = [name for name, is_running in self._is_running.items() if is_running]
        return self._stop_detector.update(
            is_running=any(newest_answer - self._answered_at[name] < _MAX_SILENCE_SECONDS for name in running)
        )


def stream_logs(
    record: RunRecord,
    host_group: HostGroup,
    run: str,
    *,
    follow: bool,
    tail: int | None,
    since: float | None,
    node: str | None,
    report_progress: ProgressReporter | None,
) -> Iterator[LogLine]:
    """Yield the output of all nodes, or of `node`; with `follow`, until the run ends."""
    with host_group:
        if not follow:
            lines_by_host, failed = host_group.collect_results_and_errors(lambda host: read_log_lines(host, run, tail))
            for error in failed.values():
                if report_progress:
                    report_progress(f"{error}; its output is missing")
            selected = [[line for line in lines if _is_line_selected(line, node, since)] for lines in lines_by_host.values()]
            yield from heapq.merge(*selected, key=lambda line: line.time)
            return
        yield from _follow_logs(host_group, run, tail=tail, since=since, node=node, report_progress=report_progress)


def _follow_logs(
    host_group: HostGroup, run: str, *, tail: int | None, since: float | None, node: str | None, report_progress: ProgressReporter | None
) -> Iterator[LogLine]:
    initial_lines: dict[str, list[LogLine]] = {}
    times: dict[str, float] = {}
    live_nodes = _LiveNodes(host_group.hosts)
    reachable: dict[str, bool] = {}
    caught_up = False
    with HostUpdateStream(host_group, run, tail) as stream:
        for message in stream:
            has_stopped = live_nodes.update(message)
            if caught_up and has_stopped:
                return
            if message is None:
                continue
            host, update = message
            if isinstance(update, HostError):
                lines = []
                if report_progress and reachable.get(host, True):
                    report_progress(f"{update}; its output follows when the host is reachable again")
            else:
                if report_progress and not reachable.get(host, True):
                    report_progress(f"host {host} is reachable again")
                file_lines = [(name, line) for name, text in update["files"].items() for line in text.split("\n")]
                lines = [line for line in _parse_log_lines(file_lines, times) if _is_line_selected(line, node, since)]
            reachable[host] = not isinstance(update, HostError)
            if caught_up:
                yield from lines
            else:
                initial_lines[host] = initial_lines.get(host, []) + lines
                has_more = not isinstance(update, HostError) and update["has_more"]
                caught_up = len(initial_lines) == len(host_group.hosts) and not has_more
                if caught_up:
                    yield from heapq.merge(*initial_lines.values(), key=lambda line: line.time)
                    if not live_nodes.may_run:
                        return


def _is_line_selected(line: LogLine, node: str | None, since: float | None) -> bool:
    return node in (None, line.node) and line.time >= (since or 0.0)
