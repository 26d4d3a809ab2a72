"""Everything that happens to a run as one stream: lines of all nodes, states of their tasks, events of the notice board."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import TaskState, Update
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.logs import Line, Reader, moment
from swarmtrain.launchers.record import Record
from swarmtrain.launchers.swarm import observe
from swarmtrain.launchers.swarm.look import SILENCE, Looker, Seen
from swarmtrain.launchers.swarm.observe import Service, Task
from swarmtrain.launchers.swarm.patience import USUAL, Patience
from swarmtrain.wire import NOTE, RENDEZVOUS, VERDICT, Event

# After the verdict, for lines that are still on their way.
_TRAIL = 1.0
# Whoever still talks so long after the verdict has not heard it, and may never end.
_LONGEST_TRAIL = 10.0
# A run without a verdict has ended when for so long nothing of it was to run any more.
_OVER = 5.0
# A log that is silent for so many seconds is asked for anew.
_BOARD_SILENCE = 10.0
_NODE_SILENCE = 30.0
# Readers wait when the consumer is that far behind.
_QUEUE = 50_000
# Lines of each container that are still read when it is stopped, whatever was followed before.
_LAST_WORDS = 1000


@dataclass(frozen=True)
class Scope:
    """What of the nodes' logs is followed; the board's is from its start."""

    since: float | None = None
    """Seconds since the epoch, None for all there is."""
    tail: int | None = None
    """Bounds the lines of each node from before now."""
    before: Sequence[Line] = ()
    """Lines that were read already, in the order of time: their nodes are followed behind them."""
    only: str | None = None
    """The one node to follow."""


def follow(engine: Engine, run: str, scope: Scope, patience: Patience = USUAL) -> Iterator[Update]:
    """Yield what happens to `run` until its verdict or its removal.

    When the manager does not answer, a note says so, and another when it answers again; nothing is lost meanwhile.
    Raises EngineError if it does not for as long as `patience` says.
    """
    follower = _Follower(engine, run, scope, patience)
    try:
        yield from follower.updates()
    finally:
        follower.close()


@contextlib.contextmanager
def last_words(engine: Engine, run: str, services: list[Service]) -> Iterator[None]:
    """Keep in the state directory what the services say meanwhile: with a task that is removed, Swarm forgets its log."""
    lines: queue.Queue[Line] = queue.Queue(_QUEUE)
    readers = [
        Reader(engine, service.source, _short(service, run), lines, since=None, tail=_LAST_WORDS if service.is_node else None)
        for service in services
    ]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        record = Record(run)
        for line in sorted(_waiting(lines), key=lambda line: line.time):
            record.add(line)
        record.close()
        for reader in readers:
            reader.close()


def _waiting(lines: queue.Queue[Line]) -> Iterator[Line]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield lines.get_nowait()


def manager(engine: Engine) -> str:
    """Return how the manager is called in what is said of it; notes bear this as their node."""
    return f"the manager at {engine.address}"


class _Follower:
    def __init__(self, engine: Engine, run: str, scope: Scope, patience: Patience) -> None:
        self._engine, self._run, self._scope, self._patience = engine, run, scope, patience
        self._before: dict[str, list[Line]] = {}
        for line in scope.before:
            self._before.setdefault(line.node, []).append(line)
        self._lines: queue.Queue[Line] = queue.Queue(_QUEUE)
        self._readers: dict[str, Reader] = {}
        self._states: dict[str, TaskState] = {}
        self._record = Record(run)
        self._old_boards: frozenset[str] = frozenset()
        self._gone = False
        self._over_since: float | None = None
        self._looker = Looker(engine, run)
        self._answered = time.monotonic()
        self._lost = ""

    def updates(self) -> Iterator[Update]:
        """Look, read, and stop when there is nothing more to come."""
        verdict_at: float | None = None
        self._looker.start()
        while True:
            yield from self._news()
            batch = self._batch()
            for line in batch:
                update = self._update(line)
                if update is not None:
                    yield update
                    if isinstance(update, Event) and update.kind == VERDICT:
                        verdict_at = time.monotonic()
            if self._done(verdict_at, quiet=not batch):
                return

    def close(self) -> None:
        """End all threads and close the record."""
        self._looker.close()
        for reader in self._readers.values():
            reader.close()
        self._record.close()

    def _batch(self) -> list[Line]:
        """Return the lines of the next moment, in the order of their times."""
        lines = moment(self._lines)
        for line in lines:
            self._record.add(line)
        self._record.flush()
        return lines

    def _update(self, line: Line) -> Update | None:
        event = line.event()
        if event is None:
            return line.log_line()
        # A run that was started again after its verdict has that one in its log still.
        stale = event.kind == VERDICT and line.task in self._old_boards
        return None if stale else event

    def _done(self, verdict_at: float | None, *, quiet: bool) -> bool:
        now = time.monotonic()
        if verdict_at is not None:
            return now - verdict_at > (_TRAIL if quiet else _LONGEST_TRAIL)
        return quiet and (self._gone or (self._over_since is not None and now - self._over_since > _OVER))

    def _news(self) -> Iterator[Update]:
        """Yield what the newest looks say, or once that there are none. Raises EngineError when there were none for too long."""
        while not self._looker.seen.empty():
            seen = self._looker.seen.get()
            self._answered = time.monotonic()
            if self._lost:
                self._lost = ""
                yield self._note("answers again")
            yield from self._take_in(seen)
        silence = time.monotonic() - self._answered
        if silence > SILENCE and not self._lost:
            self._lost = self._why_lost()
            yield self._note(f"{self._lost}; {self._run} goes on, and is followed again as soon as that is possible")
        if silence > self._patience.manager:
            raise EngineError(f"{self._why_lost()} for {silence:.0f} s", place=manager(self._engine), hint=self._way_on())

    def _note(self, message: str) -> Event:
        return Event(NOTE, {"node": manager(self._engine), "message": message})

    def _why_lost(self) -> str:
        error = self._looker.error
        # Without a status, there was no answer at all, whatever the reason is called.
        return error.message if error and error.status is not None else "does not answer"

    def _way_on(self) -> str:
        others = f", or through another manager ({', '.join(self._looker.managers)}) with DOCKER_HOST=ssh://MANAGER"
        more = others if len(self._looker.managers) > 1 else ""
        return f"{self._run} goes on; follow it again with swarmtrain logs -f {self._run}{more}"

    def _take_in(self, seen: Seen) -> list[TaskState]:
        self._gone = not seen.services
        self._remember_board(seen)
        self._read_new(seen.services)
        self._notice_end(seen)
        return self._changes(seen)

    def _remember_board(self, seen: Seen) -> None:
        board = observe.board(seen.services, self._run)
        if board is not None:
            self._old_boards = observe.replaced(seen.tasks, board.id)

    def _read_new(self, services: list[Service]) -> None:
        for service in services:
            node = _short(service, self._run)
            if service.id not in self._readers and (node == RENDEZVOUS or self._scope.only in (None, node)):
                # What was read before was said by the first service of this name: another is a new one.
                before = () if node == RENDEZVOUS else self._before.pop(node, ())
                scope = Scope() if node == RENDEZVOUS else replace(self._scope, before=before)
                reader = Reader(self._engine, service.source, node, self._lines, since=scope.since, tail=scope.tail, before=scope.before)
                self._readers[service.id] = reader
                reader.start()

    def _renew_silent(self, services: list[Service], ended: set[str]) -> None:
        for service in services:
            reader, node = self._readers.get(service.id), _short(service, self._run)
            if reader is None:
                continue
            if node in ended or reader.silence > (_BOARD_SILENCE if node == RENDEZVOUS else _NODE_SILENCE):
                reader.renew()

    def _notice_end(self, seen: Seen) -> None:
        nodes = [service for service in seen.services if service.is_node]
        # The board of a run that was stopped lives on.
        stopped = bool(nodes) and not any(service.replicas for service in nodes)
        over = all(_over(service, seen.tasks) for service in (nodes if stopped else seen.services))
        self._over_since = (self._over_since or time.monotonic()) if over else None

    def _changes(self, seen: Seen) -> list[TaskState]:
        states = [observe.task_state(_short(service, self._run), seen.tasks, service, seen.hosts) for service in seen.services]
        present = {state.node for state in states}
        removed = [TaskState(state.node, state.host, "removed") for state in self._states.values() if state.node not in present]
        changed = [state for state in states if self._states.get(state.node) != state]
        self._renew_silent(seen.services, {state.node for state in changed if state.state in observe.FINAL})
        self._states = {state.node: state for state in states}
        return [*changed, *removed]


def _over(service: Service, found: list[Task]) -> bool:
    """Say whether nothing of the service runs, and nothing is to."""
    task = observe.newest(found, service.id)
    if service.replicas == 0:
        return task is None or task.over
    return task is not None and task.over and task.desired in ("shutdown", "remove")


def _short(service: Service, run: str) -> str:
    return service.name.removeprefix(f"{run}_")
