"""What the hosts of a run tell while it goes: one thread asks each of them, and one stream comes out."""

from __future__ import annotations

import heapq
import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

from swarmtrain.errors import HostError
from swarmtrain.host.folder import EVENTS
from swarmtrain.launchers.base import LogLine, Say, TaskState, Update
from swarmtrain.launchers.kept import timed
from swarmtrain.launchers.ssh.host import Host, Team
from swarmtrain.launchers.ssh.record import Record
from swarmtrain.wire import RENDEZVOUS, VERDICT, Event

_WAIT = 2.0
_AGAIN = 2.0
_TRAIL = 5.0  # seconds after the verdict in which nodes may still print their last lines
_ENDED = ("complete", "shutdown")


def task(node: str, host: str, state: dict[str, Any] | None) -> TaskState:
    """Return how a process stands, from its keeper's state."""
    if state is None:
        return TaskState(node, host, "starting")
    code = state["exit_code"]
    return TaskState(node, host, state["state"], f"exit code {code}" if code else "", code)


def unreachable(node: str, host: str, error: HostError) -> TaskState:
    """Return how a process stands whose host cannot be asked."""
    return TaskState(node, host, "unreachable", error.message)


def events(host: Host, run: str) -> list[Event]:
    """Return the events on the board so far. Raises HostError."""
    return [event for line in lines_of(host, run, EVENTS) if (event := Event.from_line(line))]


def printed(host: Host, run: str, tail: int | None = None) -> list[LogLine]:
    """Return what the processes on a host have printed, in the order of time. Raises HostError."""
    return _lines(_read(host, run, None, tail), {})


def lines_of(host: Host, run: str, file: str) -> list[str]:
    """Return the lines of one file of the run's folder. Raises HostError."""
    return [line for _, line in _read(host, run, [file], None)]


def _read(host: Host, run: str, only: list[str] | None, tail: int | None) -> list[tuple[str, str]]:
    """Return the lines of files so far, each with its file's name."""
    offsets: dict[str, int] = {}
    found: list[tuple[str, str]] = []
    while True:
        news = host.ask("news", run=run, offsets=offsets, only=only, tail=tail)
        found += [(name, line) for name, text in news["files"].items() for line in text.split("\n")]
        offsets |= news["offsets"]
        if not news["more"]:
            return found


def _lines(found: list[tuple[str, str]], times: dict[str, float]) -> list[LogLine]:
    lines = []
    for name, text in found:
        if name != EVENTS:
            node = name.removesuffix(".log")
            lines.append(timed(node, text, times.get(node, 0.0)))
            times[node] = lines[-1].time
    return sorted(lines, key=lambda line: line.time)


class Feed(threading.Thread):
    """Asks one host again and again for what is new, as long as it is wanted, and puts that into `out`."""

    def __init__(self, host: Host, run: str, out: queue.Queue[tuple[str, dict[str, Any] | HostError]], tail: int | None) -> None:
        super().__init__(daemon=True)
        self.host, self.run_name, self.out, self.tail = host, run, out, tail
        self.wanted = threading.Event()
        self.wanted.set()

    def run(self) -> None:
        """Until it is wanted no more."""
        offsets: dict[str, int] = {}
        wait = 0.0
        while self.wanted.is_set():
            try:
                news = self.host.ask("news", run=self.run_name, offsets=offsets, wait=wait, tail=None if offsets else self.tail)
            except HostError as error:
                self.out.put((self.host.name, error))
                time.sleep(_AGAIN)
                continue
            offsets |= news["offsets"]
            self.out.put((self.host.name, news))
            wait = 0.0 if news["more"] else _WAIT


class Stream:
    """All feeds of a run. Iterating yields what one host told, or why it did not; nothing for a while now and then."""

    def __init__(self, team: Team, run: str, tail: int | None) -> None:
        self._out: queue.Queue[tuple[str, dict[str, Any] | HostError]] = queue.Queue()
        self._feeds = [Feed(host, run, self._out, tail) for host in team.hosts.values()]
        self._team = team

    def __enter__(self) -> Stream:
        for feed in self._feeds:
            feed.start()
        return self

    def __exit__(self, *_: object) -> None:
        for feed in self._feeds:
            feed.wanted.clear()

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any] | HostError] | None]:
        while True:
            try:
                yield self._out.get(timeout=0.2)
            except queue.Empty:
                yield None


def watch(record: Record, team: Team, run: str) -> Iterator[Update]:
    """Yield events from the start, output and states from now on, until a verdict and its last lines, or the run's removal."""
    states: dict[str, TaskState] = {}
    times: dict[str, float] = {}
    nodes = {**record.nodes, RENDEZVOUS: record.board}
    verdict_at: float | None = None
    with team, Stream(team, run, 0) as stream:
        for told in stream:
            if told is not None:
                host, news = told
                for state in _states(host, news, nodes):
                    if states.get(state.node) != state:
                        states[state.node] = state
                        yield state
                if isinstance(news, HostError):
                    continue
                if not news["exists"]:
                    if host == record.board:
                        return
                    continue
                found = [(name, line) for name, text in news["files"].items() for line in text.split("\n")]
                yield from _lines(found, times)
                for name, line in found:
                    if name == EVENTS and (event := Event.from_line(line)):
                        verdict_at = verdict_at or (time.monotonic() if event.kind == VERDICT else None)
                        yield event
            if verdict_at is not None:
                there = [state for state in states.values() if state.state != "unreachable"]
                ended = bool(there) and all(state.state in _ENDED for state in there)
                if ended or time.monotonic() - verdict_at > _TRAIL:
                    return


def _states(host: str, news: dict[str, Any] | HostError, nodes: dict[str, str]) -> list[TaskState]:
    if isinstance(news, HostError):
        return [unreachable(node, host, news) for node, place in nodes.items() if place == host]
    return [task(node, host, state) for node, state in news["states"].items()]


def logs(
    record: Record, team: Team, run: str, *, follow: bool, tail: int | None, since: float | None, node: str | None, say: Say | None
) -> Iterator[LogLine]:
    """Yield the output of the nodes, or of one, and go on as long as the run does if `follow`."""
    with team:
        if not follow:
            found, failed = team.tried(lambda host: printed(host, run, tail))
            for error in failed.values():
                if say:
                    say(f"{error}; what it printed is missing here")
            chosen = [[line for line in lines if _wanted(line, node, since)] for lines in found.values()]
            yield from heapq.merge(*chosen, key=lambda line: line.time)
            return
        yield from _followed(team, run, tail=tail, since=since, node=node, say=say)


def _followed(team: Team, run: str, *, tail: int | None, since: float | None, node: str | None, say: Say | None) -> Iterator[LogLine]:
    first: dict[str, list[LogLine]] = {}
    times: dict[str, float] = {}
    alive: dict[str, bool] = {}
    heard: dict[str, bool] = {}
    caught_up = False
    with Stream(team, run, tail) as stream:
        for told in stream:
            if told is None:
                continue
            host, news = told
            if isinstance(news, HostError):
                alive[host], lines = False, []
                if say and heard.get(host, True):
                    say(f"{news}; its output comes when it does")
            else:
                if say and not heard.get(host, True):
                    say(f"host {host} answers again")
                alive[host] = bool(news["alive"]) or news["more"]
                texts = [(name, line) for name, text in news["files"].items() for line in text.split("\n")]
                lines = [line for line in _lines(texts, times) if _wanted(line, node, since)]
            heard[host] = not isinstance(news, HostError)
            if caught_up:
                yield from lines
            else:
                first[host] = first.get(host, []) + lines
                more = not isinstance(news, HostError) and news["more"]
                caught_up = len(first) == len(team.hosts) and not more
                if caught_up:
                    yield from heapq.merge(*first.values(), key=lambda line: line.time)
            if caught_up and not any(alive.values()):
                return


def _wanted(line: LogLine, node: str | None, since: float | None) -> bool:
    return node in (None, line.node) and line.time >= (since or 0.0)
