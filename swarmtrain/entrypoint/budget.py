"""How often a run may fail, and which failure that comes again is a bug. Hardware dies often, a bug at once.

Pure: time comes through `now` (seconds, monotonic). A world counts once, however many of its ranks fail.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from swarmtrain.entrypoint.suspects import HOUR, of_a_machine
from swarmtrain.wire import collateral

_CHANGING = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)


class Budget:
    """The failures of one run, and how many more it may have."""

    def __init__(self, max_restarts: int, max_restarts_per_hour: int, now: Callable[[], float]) -> None:
        self._max_restarts, self._per_hour = max_restarts, max_restarts_per_hour
        self._now = now
        self._in_a_row = 0
        self._times: deque[float] = deque()
        self._last: tuple[str, str | None] = "", None
        self._before: str | None = None

    def progress(self) -> None:
        """The run has come further than ever: all restarts in a row are given back."""
        self._in_a_row = 0

    def failed(self) -> None:
        """A world has failed."""
        self._in_a_row += 1
        self._times.append(self._now())
        while self._times[0] <= self._now() - HOUR:
            self._times.popleft()

    def caused(self, world: str, data: Mapping[str, Any]) -> None:
        """This is why `world` has failed, as far as is known by now."""
        if self._last[0] != world:
            self._before = self._last[1]
        self._last = world, _bug(data)

    @property
    def spent(self) -> str | None:
        """Why the run is to be given up, None if it is not."""
        if self._in_a_row > self._max_restarts:
            times = "once" if self._in_a_row == 1 else f"{self._in_a_row} times in a row"
            return f"failed {times} without a new step, max_restarts is {self._max_restarts}"
        if len(self._times) > self._per_hour:
            return f"failed {len(self._times)} times within an hour, max_restarts_per_hour is {self._per_hour}"
        return None

    @property
    def bug(self) -> str | None:
        """What makes the last failure a bug: the one before it was the same exception at the same step. None if it was not."""
        same = self._last[1] is not None and self._last[1] == self._before
        return "the same at the same step as the time before: no fault of a machine" if same else None


def _bug(data: Mapping[str, Any]) -> str | None:
    """Name an exception and its step, so that it is known again. None for what may be a machine's fault, or has no step."""
    step = data.get("step")
    machine = of_a_machine(data) or collateral(data) or data.get("oom")
    if machine or data.get("permanent") is False or not isinstance(step, int):
        return None
    return f"{step}: {_CHANGING.sub('#', str(data.get('error')))}"
