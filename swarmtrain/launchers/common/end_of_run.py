"""Detect the end of a run that has no outcome: a command has stopped it, or somebody has ended its processes."""

from __future__ import annotations

import time
from collections.abc import Callable

_STOPPED_SECONDS = 10.0
"""Seconds without a running node after which a run has ended. A deploy that restarts all nodes takes less."""


class StopDetector:
    """Detects that the nodes of a run have stopped for good; its coordinator may keep running."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stopped_since: float | None = None

    def update(self, *, is_running: bool) -> bool:
        """Return whether no node has been running for 10 s. `is_running`: whether a node runs now, or will be restarted."""
        now = self._clock()
        if is_running:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        return self._stopped_since is not None and now - self._stopped_since > _STOPPED_SECONDS
