"""Stream of updates of a run: the output of all nodes, the states of their tasks, and the coordinator's events."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swarmtrain.errors import EXIT_ERROR, EngineError
from swarmtrain.launchers.base import RunUpdate, TaskState
from swarmtrain.launchers.common.container_logs import ContainerLogLine, LogReader, take_line_batch
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.common.log_recorder import LogRecorder, record_log_lines
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service, Task
from swarmtrain.launchers.swarm.convergence import find_exec_failures, read_min_nodes
from swarmtrain.launchers.swarm.following.coordinator_repair import CoordinatorRepair
from swarmtrain.launchers.swarm.following.state_poller import UNREACHABLE_AFTER_SECONDS, StatePoller, SwarmSnapshot
from swarmtrain.launchers.swarm.queue.queue_entry import find_queue_entry, is_waiting_in_queue
from swarmtrain.launchers.swarm.step_executor import run_in_parallel, scale_service_to_zero
from swarmtrain.launchers.swarm.task_states import build_task_states
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts
from swarmtrain.protocol import EVENT_NOTE, EVENT_OUTCOME, RENDEZVOUS_SERVICE, Event

# Seconds to wait after the outcome for lines that have not arrived yet.
_TRAILING_LINES_SECONDS = 1.0
# Maximum seconds to wait after the outcome for nodes that still print: a node that has missed the outcome may never exit.
_MAX_TRAILING_LINES_SECONDS = 10.0
# A run without an outcome counts as ended when all of its tasks have been final for this many seconds.
_FINISHED_SECONDS = 5.0
# A log that is silent for this many seconds is requested again.
_MAX_COORDINATOR_SILENCE_SECONDS = 10.0
_MAX_NODE_SILENCE_SECONDS = 30.0
# Readers wait when this many lines are in the queue.
_MAX_QUEUED_LINES = 50_000
# Seconds between two checks whether containers fail before their agent starts.
_EXEC_CHECK_SECONDS = 5.0
# Number of last lines that are read from each container when it is stopped, even if its log was not followed before.
_FINAL_LINES = 1000


@dataclass(frozen=True)
class LogScope:
    """Selection of the lines to follow in the nodes' logs. The coordinator's log is always read from its start."""

    since: float | None = None
    """Follow lines from this time on, in seconds since the epoch; None: all available lines."""
    tail: int | None = None
    """Number of earlier lines to read per node."""
    previous_lines: Sequence[ContainerLogLine] = ()
    """Lines that were read before, ordered by time; the logs of their nodes are followed from the last of them on."""
    node: str | None = None
    """The only node to follow."""


def watch_run(
    engine: DockerEngine, recorded_run: RecordedRun, scope: LogScope, timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS
) -> Iterator[RunUpdate]:
    """Yield updates of `recorded_run` until its outcome or removal, and record its output.

    One update reports that the manager does not answer, another that it answers again; no events or lines are lost. Raises
    EngineError if the manager does not answer for `timeouts.manager_seconds`.
    """
    stream = _SwarmStream(engine, recorded_run, scope, timeouts)
    try:
        yield from stream.stream_updates()
    finally:
        stream.close()


@contextlib.contextmanager
def record_final_log_lines(engine: DockerEngine, run: str, services: list[Service]) -> Iterator[None]:
    """Record the services' output during the block in the state directory: Swarm deletes a task's log with the task."""
    if not services:
        yield
        return
    recorded_run = RecordedRun(run, cluster_state.find_identity(services, run))
    lines: queue.Queue[ContainerLogLine] = queue.Queue(_MAX_QUEUED_LINES)
    readers = [
        LogReader(engine, service.api_path, service.get_short_name(run), lines, since=None, tail=_FINAL_LINES if service.is_node else None)
        for service in services
    ]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        record_log_lines(recorded_run, sorted(_drain_queue(lines), key=lambda line: line.time))
        for reader in readers:
            reader.close()


def _drain_queue(line_queue: queue.Queue[ContainerLogLine]) -> Iterator[ContainerLogLine]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield line_queue.get_nowait()


def format_manager_name(engine: DockerEngine) -> str:
    """Return the manager's name for messages; updates about the manager have this name as their node."""
    return f"the manager at {engine.address}"


class _SwarmStream:
    def __init__(self, engine: DockerEngine, recorded_run: RecordedRun, scope: LogScope, timeouts: SwarmTimeouts) -> None:
        self._engine, self._run, self._scope, self._timeouts = engine, recorded_run.name, scope, timeouts
        self._already_read: dict[str, list[ContainerLogLine]] = {}
        for line in scope.previous_lines:
            self._already_read.setdefault(line.node, []).append(line)
        self._lines: queue.Queue[ContainerLogLine] = queue.Queue(_MAX_QUEUED_LINES)
        self._readers: dict[str, LogReader] = {}
        self._states: dict[str, TaskState] = {}
        self._recorder = LogRecorder(recorded_run)
        self._replaced_coordinators: frozenset[str] = frozenset()
        self._is_removed = False
        self._finished_since: float | None = None
        self._poller = StatePoller(engine, self._run)
        self._repair = CoordinatorRepair(engine, self._run)
        self._answered_at = time.monotonic()
        self._lost_reason = ""
        self._snapshot: SwarmSnapshot | None = None
        self._exec_check_at = 0.0

    def stream_updates(self) -> Iterator[RunUpdate]:
        """Yield updates: poll the states and read the logs until the run has ended."""
        outcome_at: float | None = None
        self._poller.start()
        while True:
            yield from self._stream_task_states()
            batch = self._take_log_lines()
            for line in batch:
                if repair_message := self._repair.handle_line(line):
                    yield self._build_manager_status_event(repair_message)
                update = self._convert_log_line_to_update(line)
                if update is not None:
                    yield update
                    if isinstance(update, Event) and update.kind == EVENT_OUTCOME:
                        outcome_at = time.monotonic()
            if failure := self._find_exec_failure():
                yield failure
                return
            if self._is_stream_finished(outcome_at, is_quiet=not batch):
                return

    def _find_exec_failure(self) -> Event | None:
        """Return the outcome of a run whose containers fail before their agent starts, after stopping its nodes; None for other runs.

        The coordinator does not hear of such containers, and Swarm restarts them indefinitely.
        """
        snapshot, now = self._snapshot, time.monotonic()
        if snapshot is None or now < self._exec_check_at:
            return None
        self._exec_check_at = now + _EXEC_CHECK_SECONDS
        nodes = [service for service in snapshot.services if service.is_node and service.replicas]
        failures = find_exec_failures(self._engine, self._run, nodes, snapshot.tasks, snapshot.hosts)
        is_queued = find_queue_entry(snapshot.services, self._run) is not None  # the scheduler stops it
        if not failures or is_queued or len(nodes) - len(failures) >= read_min_nodes(snapshot.services, self._run):
            return None
        run_in_parallel(lambda service: scale_service_to_zero(self._engine, service), nodes)
        reason = f"cannot be started: {'; '.join(map(str, failures))}"
        return Event(EVENT_OUTCOME, {"status": "failed", "reason": reason, "exit_code": EXIT_ERROR, "hint": failures[0].hint})

    def close(self) -> None:
        """End all reader threads, and close the recorder."""
        self._poller.close()
        for reader in self._readers.values():
            reader.close()
        self._recorder.close()

    def _take_log_lines(self) -> list[ContainerLogLine]:
        """Return the next batch of log lines, ordered by time, and append them to the run's recorded log."""
        lines = take_line_batch(self._lines)
        for line in lines:
            self._recorder.append_line(line)
        self._recorder.flush()
        return lines

    def _convert_log_line_to_update(self, line: ContainerLogLine) -> RunUpdate | None:
        event = line.parse_event()
        if event is None:
            return line.to_log_line()
        # The log of a run that was restarted after its outcome still contains that outcome.
        stale = event.kind == EVENT_OUTCOME and line.task in self._replaced_coordinators
        return None if stale else event

    def _is_stream_finished(self, outcome_at: float | None, *, is_quiet: bool) -> bool:
        now = time.monotonic()
        if outcome_at is not None:
            return now - outcome_at > (_TRAILING_LINES_SECONDS if is_quiet else _MAX_TRAILING_LINES_SECONDS)
        return is_quiet and (self._is_removed or (self._finished_since is not None and now - self._finished_since > _FINISHED_SECONDS))

    def _stream_task_states(self) -> Iterator[RunUpdate]:
        """Yield updates from the new snapshots, or one update if the manager stops answering. Raises EngineError if that lasts too long."""
        while not self._poller.snapshots.empty():
            snapshot = self._poller.snapshots.get()
            self._answered_at = time.monotonic()
            if self._lost_reason:
                self._lost_reason = ""
                yield self._build_manager_status_event("answers again")
            yield from self._process_snapshot(snapshot)
        unanswered_seconds = time.monotonic() - self._answered_at
        if unanswered_seconds > UNREACHABLE_AFTER_SECONDS and not self._lost_reason:
            self._lost_reason = self._describe_connection_loss()
            yield self._build_manager_status_event(f"{self._lost_reason}; {self._run} continues; the log stream is lost, reconnecting")
        if unanswered_seconds > self._timeouts.manager_seconds:
            raise EngineError(
                f"{self._describe_connection_loss()} for {unanswered_seconds:.0f} s",
                place=format_manager_name(self._engine),
                hint=self._build_reconnect_hint(),
            )

    def _build_manager_status_event(self, message: str) -> Event:
        return Event(EVENT_NOTE, {"node": format_manager_name(self._engine), "message": message})

    def _describe_connection_loss(self) -> str:
        error = self._poller.last_error
        # An error without an HTTP status means that there was no response, whatever the error's message says.
        return error.message if error and error.status is not None else "does not answer"

    def _build_reconnect_hint(self) -> str:
        other_managers = f", or through another manager ({', '.join(self._poller.managers)}) with DOCKER_HOST=ssh://MANAGER"
        alternative = other_managers if len(self._poller.managers) > 1 else ""
        return f"{self._run} continues; follow it again with swarmtrain logs -f {self._run}{alternative}"

    def _process_snapshot(self, snapshot: SwarmSnapshot) -> list[TaskState]:
        self._snapshot, self._is_removed = snapshot, not snapshot.services
        self._repair.observe_snapshot(snapshot)
        self._remember_replaced_coordinators(snapshot)
        self._start_new_log_readers(snapshot.services)
        self._update_finish_time(snapshot)
        return self._collect_changed_task_states(snapshot)

    def _remember_replaced_coordinators(self, snapshot: SwarmSnapshot) -> None:
        coordinator = cluster_state.find_coordinator(snapshot.services, self._run)
        if coordinator is not None:
            self._replaced_coordinators = cluster_state.find_replaced_task_ids(snapshot.tasks, coordinator.id)

    def _start_new_log_readers(self, services: list[Service]) -> None:
        for service in services:
            node = service.get_short_name(self._run)
            if service.id not in self._readers and (node == RENDEZVOUS_SERVICE or self._scope.node in (None, node)):
                # The lines read before came from the first service of this name: any later one is a new service.
                already_read = () if node == RENDEZVOUS_SERVICE else self._already_read.pop(node, ())
                scope = LogScope() if node == RENDEZVOUS_SERVICE else replace(self._scope, previous_lines=already_read)
                reader = LogReader(
                    self._engine,
                    service.api_path,
                    node,
                    self._lines,
                    since=scope.since,
                    tail=scope.tail,
                    previous_lines=scope.previous_lines,
                )
                self._readers[service.id] = reader
                reader.start()

    def _reconnect_silent_log_readers(self, services: list[Service], ended_nodes: set[str]) -> None:
        for service in services:
            reader, node = self._readers.get(service.id), service.get_short_name(self._run)
            if reader is None:
                continue
            if node in ended_nodes or reader.silent_seconds > (
                _MAX_COORDINATOR_SILENCE_SECONDS if node == RENDEZVOUS_SERVICE else _MAX_NODE_SILENCE_SECONDS
            ):
                reader.reconnect()

    def _update_finish_time(self, snapshot: SwarmSnapshot) -> None:
        nodes = [service for service in snapshot.services if service.is_node]
        # The coordinator of a stopped run keeps running.
        is_stopped = bool(nodes) and not any(service.replicas for service in nodes)
        if is_waiting_in_queue(snapshot.services, self._run):
            self._finished_since = None
            return
        is_finished = all(_is_service_finished(service, snapshot.tasks) for service in (nodes if is_stopped else snapshot.services))
        self._finished_since = (self._finished_since or time.monotonic()) if is_finished else None

    def _collect_changed_task_states(self, snapshot: SwarmSnapshot) -> list[TaskState]:
        states = build_task_states(self._run, snapshot.services, snapshot.tasks, snapshot.hosts, snapshot.unavailable_hosts)
        present = {state.node for state in states}
        removed = [TaskState(state.node, state.host, "removed") for state in self._states.values() if state.node not in present]
        changed = [state for state in states if self._states.get(state.node) != state]
        self._reconnect_silent_log_readers(
            snapshot.services, {state.node for state in changed if state.state in cluster_state.FINAL_STATES}
        )
        self._states = {state.node: state for state in states}
        return [*changed, *removed]


def _is_service_finished(service: Service, tasks: list[Task]) -> bool:
    """Return whether all tasks of the service have ended and will not be restarted."""
    task = cluster_state.find_newest_task(tasks, service.id)
    if service.replicas == 0:
        return task is None or task.is_final
    return task is not None and task.is_final and task.desired_state in ("shutdown", "remove")
