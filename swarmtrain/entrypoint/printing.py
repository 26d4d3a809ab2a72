"""What the notice board prints, and when: progress and usage so seldom that a month of them leaves room in the log for the rest.

Pure: events go out through `publish`, time comes through `now` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from swarmtrain.wire import USAGE, Event

PROGRESS_EVERY = (0.5, 30.0)
"""Seconds between two lines of progress: the least and the most; between them a hundredth of the run's age."""
USAGE_EVERY = 10.0
"""Seconds between two lines of what the nodes use, of a run of a few nodes."""
USAGE_BYTES = 12.0
"""Bytes a second that these lines may take: the engine keeps 100 MB of the board's log, and a month of them is less than half of it."""


class Printer:
    """Prints events in their order; the newest progress waits for its turn, or for what must stand after it."""

    def __init__(self, publish: Callable[[Event], None], now: Callable[[], float]) -> None:
        self._publish, self._now = publish, now
        self._born = now()
        self._held: Event | None = None
        self._progress_at = float("-inf")
        self._usage: dict[str, dict[str, Any]] = {}
        self._usage_at = float("-inf")

    def print(self, event: Event) -> None:
        """Print an event, behind the progress that was made before it."""
        held, self._held = self._held, None
        if held is not None:
            self._publish(held)
        self._publish(event)

    def progress(self, event: Event) -> None:
        """Print progress if it is time, and keep it until then; the newest takes the place of one that waits."""
        now, (least, most) = self._now(), PROGRESS_EVERY
        self._held = event
        if now >= self._progress_at:
            self._progress_at = now + min(most, max(least, (now - self._born) / 100))
            self._held = None
            self._publish(event)

    def usage(self, data: dict[str, Any], here: Container[str]) -> None:
        """Remember what a node uses, and print that of all that are `here` when it is time."""
        self._usage[str(data["node"])] = {key: value for key, value in data.items() if key != "node"}
        if self._now() < self._usage_at:
            return
        event = Event(USAGE, {"nodes": {name: used for name, used in self._usage.items() if name in here}})
        self._usage_at = self._now() + max(USAGE_EVERY, len(event.to_line()) / USAGE_BYTES)
        self.print(event)

    def tick(self) -> None:
        """Let time pass: print the progress that has waited long enough."""
        if self._held is not None:
            self.progress(self._held)
