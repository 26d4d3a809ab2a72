"""Writer of the coordinator's log. It limits the rate of progress and usage events, so that the log can hold a run of 30 days.

Pure: events are written through `publish`, time comes from `clock` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from swarmtrain.protocol import EVENT_USAGE, Event

PROGRESS_INTERVAL_SECONDS = (0.5, 30.0)
"""Minimum and maximum seconds between two progress lines. Within these limits the interval is 1 % of the run's age."""
USAGE_INTERVAL_SECONDS = 10.0
"""Minimum seconds between two usage lines. In runs with many nodes, USAGE_BYTES_PER_SECOND makes the interval longer."""
USAGE_BYTES_PER_SECOND = 12.0
"""Byte rate limit of usage lines: in 30 days they fill less than half of the 100 MB that the engine keeps of the coordinator's log."""


class EventLogWriter:
    """Writes events to the coordinator's log in order, with rate limits for progress and usage.

    The newest progress event is held back until it is due, or until another event must follow it.
    """

    def __init__(self, publish: Callable[[Event], None], clock: Callable[[], float]) -> None:
        self._publish, self._clock = publish, clock
        self._started_at = clock()
        self._pending_progress: Event | None = None
        self._next_progress_at = float("-inf")
        self._usage_by_node: dict[str, dict[str, Any]] = {}
        self._next_usage_at = float("-inf")

    def write_event(self, event: Event) -> None:
        """Write an event to the log, after any pending progress event that precedes it."""
        pending, self._pending_progress = self._pending_progress, None
        if pending is not None:
            self._publish(pending)
        self._publish(event)

    def write_progress(self, event: Event) -> None:
        """Write the progress event `event` if one is due; otherwise keep it as pending, in place of an older pending event."""
        now, (min_interval, max_interval) = self._clock(), PROGRESS_INTERVAL_SECONDS
        self._pending_progress = event
        if now >= self._next_progress_at:
            self._next_progress_at = now + min(max_interval, max(min_interval, (now - self._started_at) / 100))
            self._pending_progress = None
            self._publish(event)

    def write_resource_usage(self, node_usage: dict[str, Any], members: Container[str]) -> None:
        """Record the resource usage of one node, and if due write the usage of all nodes in `members`."""
        self._usage_by_node[str(node_usage["node"])] = {key: value for key, value in node_usage.items() if key != "node"}
        if self._clock() < self._next_usage_at:
            return
        event = Event(EVENT_USAGE, {"nodes": {name: usage for name, usage in self._usage_by_node.items() if name in members}})
        self._next_usage_at = self._clock() + max(USAGE_INTERVAL_SECONDS, len(event.to_line()) / USAGE_BYTES_PER_SECOND)
        self.write_event(event)

    def write_pending_progress(self) -> None:
        """Write the pending progress event if it is due now."""
        if self._pending_progress is not None:
            self.write_progress(self._pending_progress)
