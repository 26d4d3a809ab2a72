"""What happens to a run's containers, as one stream; what its board and its nodes say is kept on the way."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import LogLine, TaskState, Update
from swarmtrain.launchers.docker.look import Container
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.logs import Line, Reader, moment
from swarmtrain.launchers.record import Record
from swarmtrain.wire import NOTE, RENDEZVOUS, VERDICT, Event

Look = Callable[[], dict[str, Container]]

_LOOK_EVERY = 0.5
_TRAIL = 5.0  # seconds after the verdict in which nodes may still print their last lines
_PATIENCE = 120.0  # an engine that is restarted is back in less
_QUEUE = 50_000
_ENDED = ("complete", "shutdown")


def watch(engine: Engine, run: str, look: Look, since: float) -> Iterator[Update]:
    """Yield events from the start, output since then and states, until a verdict and its last lines, or the run's removal.

    Raises EngineError if the engine does not answer for two minutes.
    """
    with _Follower(engine, run, look, since) as follower:
        states: dict[str, TaskState] = {}
        verdict_at: float | None = None
        while True:
            try:
                there = follower.look()
            except EngineError as error:
                yield from follower.lost(error)
            else:
                found = [container.task() for container in there.values()]
                yield from (state for state in found if states.get(state.node) != state)
                states = {state.node: state for state in found}
            lines = follower.lines()
            for line in lines:
                event = line.event()
                verdict_at = verdict_at or (time.monotonic() if event and event.kind == VERDICT else None)
                yield event or line.log_line()
            ended = all(state.state in _ENDED for state in states.values())
            if not lines and (not states or (verdict_at and (ended or time.monotonic() - verdict_at > _TRAIL))):
                return


def logs(engine: Engine, run: str, look: Look, *, since: float | None, tail: int | None, node: str | None) -> Iterator[LogLine]:
    """Yield the output of the nodes, or of one, as long as any of them runs. Raises EngineError."""

    def nodes() -> dict[str, Container]:
        return {name: container for name, container in look().items() if name != RENDEZVOUS and node in (None, name)}

    with _Follower(engine, run, nodes, since, tail) as follower:
        while True:
            alive = any(container.alive for container in follower.look().values())
            lines = follower.lines()
            yield from (line.log_line() for line in lines)
            if not alive and not lines:
                return


class _Follower:
    """A reader for each container there is, and their lines in the order of time."""

    def __init__(self, engine: Engine, run: str, look: Look, since: float | None, tail: int | None = None) -> None:
        self._engine, self._look, self._since, self._tail = engine, look, since, tail
        self._lines: queue.Queue[Line] = queue.Queue(_QUEUE)
        self._readers: dict[str, Reader] = {}
        self._there: dict[str, Container] = {}
        self._alive: set[str] = set()
        self._looked = float("-inf")
        self._answered = time.monotonic()
        self._record = Record(run)

    def __enter__(self) -> _Follower:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers.values():
            reader.close()
        self._record.close()

    def look(self) -> dict[str, Container]:
        """Return what there is, not asking more often than twice a second. Raises EngineError."""
        if time.monotonic() - self._looked < _LOOK_EVERY:
            return self._there
        self._looked = time.monotonic()
        self._there = self._look()
        self._answered = time.monotonic()
        for container in self._there.values():
            if container.id not in self._readers:
                everything = container.node == RENDEZVOUS
                since, tail = (None, None) if everything else (self._since, self._tail)
                reader = Reader(self._engine, container.source, container.node, self._lines, since=since, tail=tail)
                self._readers[container.id] = reader
                reader.start()
            elif container.id in self._alive and not container.alive:
                self._readers[container.id].renew()
        self._alive = {container.id for container in self._there.values() if container.alive}
        return self._there

    def lost(self, error: EngineError) -> Iterator[Event]:
        """Say once that the engine does not answer. Raises `error` if that lasts."""
        silence = time.monotonic() - self._answered
        if silence > _PATIENCE:
            raise error
        if silence < 2 * _LOOK_EVERY:
            yield Event(NOTE, {"node": error.place, "message": f"{error.message}; it is asked again"})

    def lines(self) -> list[Line]:
        """Return the lines of the next moment, in the order of their times."""
        found = moment(self._lines)
        for line in found:
            self._record.add(line)
        self._record.flush()
        return found
