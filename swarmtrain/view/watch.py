"""A status that is looked at again and again: one screen with a bar on a terminal, the changes one below the other elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmtrain.errors import EngineError, RunNotFound
from swarmtrain.view.bar import bar
from swarmtrain.view.status import Status
from swarmtrain.view.times import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY = 2.0
_SILENCE = 5.0


class Looker(threading.Thread):
    """Calls `look` every `every` seconds, until it is closed or `look` raises something else than EngineError.

    It is a thread, since a manager that hangs must not hold up the screen.
    """

    def __init__(self, look: Callable[[], Status], every: float = _EVERY) -> None:
        super().__init__(name="status", daemon=True)
        self._look, self._every = look, every
        self.seen: Status | None = None
        self.at = time.monotonic()
        self.lost: EngineError | None = None
        self.error: Exception | None = None
        self.news = threading.Event()
        self._closing = threading.Event()

    def run(self) -> None:
        """Look, and look again."""
        while self.error is None and not self._closing.is_set():
            try:
                self.seen = self._look()
                self.at, self.lost = time.monotonic(), None
            except EngineError as error:
                self.lost = error
            except Exception as error:  # noqa: BLE001  # whatever it is, it is raised where somebody sees it
                self.error = error
            self.news.set()
            self._closing.wait(self._every)

    def close(self) -> None:
        """End the thread after its next look."""
        self._closing.set()

    def screen(self) -> str:
        """Return what is to be shown: the status, and since when there has been no newer one."""
        silence = time.monotonic() - self.at
        shown = str(self.seen) if self.seen else "no status yet"
        if self.lost is None and silence < _SILENCE:
            return shown
        why = f": {self.lost}" if self.lost else ""
        return f"{shown}\n\nno newer status for {duration(silence)}{why}; asked again every {duration(self._every)}"


def watch(look: Callable[[], Status], *, every: float = _EVERY) -> Status | None:
    """Show what `look` returns until the run has its verdict, and return that; None if the run is taken down meanwhile.

    Raises SwarmtrainError if there is nothing to look at from the beginning.
    """
    looker = Looker(look, every)
    looker.start()
    try:
        return _watch(looker)
    finally:
        looker.close()


def _watch(looker: Looker) -> Status | None:
    looker.news.wait()
    if looker.seen is None and (looker.error or looker.lost):
        raise looker.error or looker.lost  # type: ignore[misc]  # one of them is an error
    with _shown() as show:
        while True:
            show(looker.screen(), looker.seen)
            if isinstance(looker.error, RunNotFound):
                return None
            if looker.error:
                raise looker.error
            if looker.seen and looker.seen.ended and looker.lost is None:
                return looker.seen
            looker.news.wait(1.0)
            looker.news.clear()


Show = Callable[[str, Status | None], None]


@contextmanager
def _shown() -> Iterator[Show]:
    """Give what puts a text on the screen in place of the one before; where there is none, it is printed if it is another."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda text, seen: live.update(_with_bar(text, seen), refresh=True)
        return
    last = ""

    def print_new(text: str, _: Status | None) -> None:
        nonlocal last
        if text != last:
            print(f"{text}\n", flush=True)  # noqa: T201  # this is the place that prints
            last = text

    yield print_new


def _with_bar(text: str, seen: Status | None) -> RenderableType:
    """Return the text with a bar below its first line: how much of the steps is done, and how long the rest takes."""
    from rich.console import Group
    from rich.text import Text

    title, _, rest = text.partition("\n")
    shown = bar(seen.progress, training=seen.state == "training") if seen else None
    if shown is None:
        return Text(text, no_wrap=True, overflow="ellipsis")
    return Group(Text(title, no_wrap=True, overflow="ellipsis"), shown, Text(rest, no_wrap=True, overflow="ellipsis"))
