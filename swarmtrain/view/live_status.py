"""Display a periodically refreshed status: on a terminal as a screen with a progress bar, elsewhere as text after each change."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmtrain.errors import EngineError, RunNotFound
from swarmtrain.view.formatting import format_duration
from swarmtrain.view.progress_bar import render_progress_bar
from swarmtrain.view.status import RunStatus

if TYPE_CHECKING:
    from rich.console import RenderableType

_REFRESH_SECONDS = 2.0
_STALE_SECONDS = 5.0


class StatusRefresher(threading.Thread):
    """Thread that calls `load_status` every `interval` seconds, until it is closed or `load_status` raises an unexpected error.

    EngineError is expected: it only marks the status as outdated. The status is loaded in a thread, so that a manager that hangs does not
    block the screen.
    """

    def __init__(self, load_status: Callable[[], RunStatus], interval: float = _REFRESH_SECONDS) -> None:
        super().__init__(name="status", daemon=True)
        self._load_status, self._interval = load_status, interval
        self.latest_status: RunStatus | None = None
        self.refreshed_at = time.monotonic()
        self.connection_error: EngineError | None = None
        self.error: Exception | None = None
        self.changed = threading.Event()
        self._closing = threading.Event()

    def run(self) -> None:
        """Refresh the status periodically until closed."""
        while self.error is None and not self._closing.is_set():
            try:
                self.latest_status = self._load_status()
                self.refreshed_at, self.connection_error = time.monotonic(), None
            except EngineError as error:
                self.connection_error = error
            except Exception as error:  # noqa: BLE001  # any error is raised again in the main thread
                self.error = error
            self.changed.set()
            self._closing.wait(self._interval)

    def close(self) -> None:
        """Stop the thread after its current refresh."""
        self._closing.set()

    def render_screen(self) -> str:
        """Return the text of the screen: the status and, if it is outdated, the time since it was loaded."""
        age = time.monotonic() - self.refreshed_at
        screen_text = str(self.latest_status) if self.latest_status else "no status yet"
        if self.connection_error is None and age < _STALE_SECONDS:
            return screen_text
        reason = f": {self.connection_error}" if self.connection_error else ""
        return f"{screen_text}\n\nstatus not updated for {format_duration(age)}{reason}; retrying every {format_duration(self._interval)}"


def watch_status(load_status: Callable[[], RunStatus], *, interval: float = _REFRESH_SECONDS) -> RunStatus | None:
    """Show the status, refreshed every `interval` seconds until the run has its outcome, and return the last status.

    Returns None if the run is taken down meanwhile. Raises SwarmtrainError if the first status cannot be loaded.
    """
    refresher = StatusRefresher(load_status, interval)
    refresher.start()
    try:
        return _watch_status_until_end(refresher)
    finally:
        refresher.close()


def _watch_status_until_end(refresher: StatusRefresher) -> RunStatus | None:
    refresher.changed.wait()
    if refresher.latest_status is None and (refresher.error or refresher.connection_error):
        raise refresher.error or refresher.connection_error  # type: ignore[misc]  # one of them is an error
    with _open_screen() as show_screen:
        while True:
            show_screen(refresher.render_screen(), refresher.latest_status)
            if isinstance(refresher.error, RunNotFound):
                return None
            if refresher.error:
                raise refresher.error
            if refresher.latest_status and refresher.latest_status.ended and refresher.connection_error is None:
                return refresher.latest_status
            refresher.changed.wait(1.0)
            refresher.changed.clear()


ShowScreen = Callable[[str, RunStatus | None], None]


@contextmanager
def _open_screen() -> Iterator[ShowScreen]:
    """Yield a function that replaces the text on the screen. Without a terminal, the function prints the text if it has changed."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="crop") as live:
            yield lambda text, seen: live.update(_insert_progress_bar(text, seen), refresh=True)
        return
    last = ""

    def print_changed_text(text: str, _: RunStatus | None) -> None:
        nonlocal last
        if text != last:
            print(f"{text}\n", flush=True)  # noqa: T201  # this is the place that prints
            last = text

    yield print_changed_text


def _insert_progress_bar(text: str, status: RunStatus | None) -> RenderableType:
    """Return the text with a progress bar below its first line: completed steps and time left."""
    from rich.console import Group
    from rich.text import Text

    title, _, remaining_text = text.partition("\n")
    progress_bar = render_progress_bar(status.progress, show_time_left=status.state == "training") if status else None
    if progress_bar is None:
        return Text(text, no_wrap=True, overflow="ellipsis")
    return Group(Text(title, no_wrap=True, overflow="ellipsis"), progress_bar, Text(remaining_text, no_wrap=True, overflow="ellipsis"))
