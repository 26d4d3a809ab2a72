"""The output of a run's nodes as one stream: what of it is shown, and where it comes from when the run is down."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from swarmtrain.errors import EngineError, RunNotFound, StateError, SwarmtrainError
from swarmtrain.launchers import find_run, kept
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.kept import directory
from swarmtrain.view.console import say
from swarmtrain.view.stream import show_line
from swarmtrain.wire import RENDEZVOUS


@dataclass(frozen=True)
class Choice:
    """Which lines are shown; `tail` bounds those of each node before the others choose among them."""

    tail: int | None = None
    since: float | None = None
    node: str | None = None
    rank: int | None = None
    pattern: re.Pattern[str] | None = None

    def __contains__(self, line: LogLine) -> bool:
        return self.rank in (None, line.rank) and (self.pattern is None or self.pattern.search(line.text) is not None)


def pattern(text: str | None) -> re.Pattern[str] | None:
    """Return the regular expression. Raises SwarmtrainError if it is none."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise SwarmtrainError(
            f"`{text}` is no regular expression: {error}", place="--grep", hint="put a \\ before each of ( [ * + ?"
        ) from None


def show_logs(run: str | None, choice: Choice, *, follow: bool) -> None:
    """Print the lines of `choice`, and go on as long as the run does if `follow`. Raises SwarmtrainError.

    Of a run that is down, what was kept on this machine is printed.
    """
    for line in _lines(run, choice, follow=follow):
        if line in choice:
            show_line(line)


def _lines(run: str | None, choice: Choice, *, follow: bool) -> Iterator[LogLine]:
    try:
        place, found = find_run(run)
    except (RunNotFound, EngineError, StateError) as error:
        if run is None or not kept.has_lines(run):
            raise
        why = f"{run} is down" if isinstance(error, RunNotFound) else str(error)
        say(f"{why}; this is what was kept of its output in {directory(run)}")
        return _kept(run, choice)
    nodes = [task.node for task in place.tasks(found) if task.node != RENDEZVOUS]
    if choice.node is not None and choice.node not in nodes:
        raise SwarmtrainError(f"it has no such node; there is: {', '.join(nodes)}", place=f"run {found}", hint=f"swarmtrain status {found}")
    return place.logs(found, follow=follow, tail=choice.tail, since=choice.since, node=choice.node, say=say)


def _kept(run: str, choice: Choice) -> Iterator[LogLine]:
    lines = (line for line in kept.lines(run, node=choice.node) if line.time >= (choice.since or 0.0))
    if choice.tail is None:
        yield from lines
        return
    last: dict[str, deque[LogLine]] = {}
    for line in lines:
        last.setdefault(line.node, deque(maxlen=choice.tail)).append(line)
    yield from sorted((line for each in last.values() for line in each), key=lambda line: line.time)
