"""Stream of updates from a run's containers. The output of the coordinator and the nodes is recorded at the same time."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import LogLine, RunUpdate, TaskState
from swarmtrain.launchers.common.container_logs import ContainerLogLine, LogReader, take_line_batch
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.end_of_run import StopDetector
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.common.log_recorder import LogRecorder
from swarmtrain.launchers.docker.container_state import Container
from swarmtrain.protocol import EVENT_NOTE, EVENT_OUTCOME, RENDEZVOUS_SERVICE, Event

ListContainers = Callable[[], dict[str, Container]]

_POLL_SECONDS = 0.5
_TRAILING_LINES_SECONDS = 5.0  # seconds after the outcome in which nodes may still print their last lines
_ENGINE_TIMEOUT_SECONDS = 120.0  # restarting an engine takes less
_MAX_QUEUED_LINES = 50_000
_FINAL_STATES = ("complete", "shutdown")


def watch_run(engine: DockerEngine, recorded_run: RecordedRun, list_containers: ListContainers, since: float) -> Iterator[RunUpdate]:
    """Yield all events of the run, its output from `since` on, and its task states.

    Ends after the outcome and the last lines of output, at the run's removal, or when no node has been running for 10 s. Raises
    EngineError if the engine does not answer for 120 s.
    """
    with _ContainerStream(engine, recorded_run, list_containers, since) as stream:
        states: dict[str, TaskState] = {}
        outcome_at: float | None = None
        has_stopped, stop_detector = False, StopDetector()
        while True:
            try:
                containers = stream.poll_containers()
            except EngineError as error:
                yield from stream.report_engine_unreachable(error)
            else:
                task_states = [container.to_task_state() for container in containers.values()]
                yield from (state for state in task_states if states.get(state.node) != state)
                states = {state.node: state for state in task_states}
                nodes = [container for container in containers.values() if container.node != RENDEZVOUS_SERVICE]
                has_stopped = stop_detector.update(is_running=any(node.is_alive for node in nodes))
            lines = stream.take_next_line_batch()
            for line in lines:
                event = line.parse_event()
                outcome_at = outcome_at or (time.monotonic() if event and event.kind == EVENT_OUTCOME else None)
                yield event or line.to_log_line()
            ended = all(state.state in _FINAL_STATES for state in states.values())
            is_over = outcome_at and (ended or time.monotonic() - outcome_at > _TRAILING_LINES_SECONDS)
            if not lines and (not states or has_stopped or is_over):
                return


def stream_logs(
    engine: DockerEngine,
    recorded_run: RecordedRun,
    list_containers: ListContainers,
    *,
    since: float | None,
    tail: int | None,
    node: str | None,
) -> Iterator[LogLine]:
    """Yield the output of all nodes, or of `node`, while any of them runs. Raises EngineError if the engine does not answer."""

    def list_node_containers() -> dict[str, Container]:
        return {name: container for name, container in list_containers().items() if name != RENDEZVOUS_SERVICE and node in (None, name)}

    with _ContainerStream(engine, recorded_run, list_node_containers, since, tail) as stream:
        while True:
            is_running = any(container.is_alive for container in stream.poll_containers().values())
            lines = stream.take_next_line_batch()
            yield from (line.to_log_line() for line in lines)
            if not is_running and not lines:
                return


class _ContainerStream:
    """The log readers of a run's containers, whose lines are merged in time order."""

    def __init__(
        self, engine: DockerEngine, recorded_run: RecordedRun, list_containers: ListContainers, since: float | None, tail: int | None = None
    ) -> None:
        self._engine, self._list_containers, self._since, self._tail = engine, list_containers, since, tail
        self._lines: queue.Queue[ContainerLogLine] = queue.Queue(_MAX_QUEUED_LINES)
        self._readers: dict[str, LogReader] = {}
        self._containers: dict[str, Container] = {}
        self._alive_ids: set[str] = set()
        self._polled_at = float("-inf")
        self._answered_at = time.monotonic()
        self._recorder = LogRecorder(recorded_run)

    def __enter__(self) -> _ContainerStream:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()
        self._recorder.close()

    def poll_containers(self) -> dict[str, Container]:
        """Return the existing containers; the engine is queried at most twice per second. Raises EngineError if it does not answer."""
        if time.monotonic() - self._polled_at < _POLL_SECONDS:
            return self._containers
        self._polled_at = time.monotonic()
        self._containers = self._list_containers()
        self._answered_at = time.monotonic()
        for container in self._containers.values():
            if container.id not in self._readers:
                is_coordinator = container.node == RENDEZVOUS_SERVICE
                since, tail = (None, None) if is_coordinator else (self._since, self._tail)
                reader = LogReader(self._engine, container.api_path, container.node, self._lines, since=since, tail=tail)
                self._readers[container.id] = reader
                reader.start()
            elif container.id in self._alive_ids and not container.is_alive:
                self._readers[container.id].reconnect()
        self._alive_ids = {container.id for container in self._containers.values() if container.is_alive}
        return self._containers

    def report_engine_unreachable(self, error: EngineError) -> Iterator[Event]:
        """Yield one event when the engine stops answering. Raises `error` if it does not answer for 120 s."""
        unanswered_seconds = time.monotonic() - self._answered_at
        if unanswered_seconds > _ENGINE_TIMEOUT_SECONDS:
            raise error
        if unanswered_seconds < 2 * _POLL_SECONDS:
            yield Event(EVENT_NOTE, {"node": error.place, "message": f"{error.message}; retrying"})

    def take_next_line_batch(self) -> list[ContainerLogLine]:
        """Return the lines of the next batch, ordered by time, and record them."""
        lines = take_line_batch(self._lines)
        for line in lines:
            self._recorder.append_line(line)
        self._recorder.flush()
        return lines
