"""Tracks the ranks that wait in torch's init_process_group until the process group of their world has formed.

Pure: time comes from `clock` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable

from swarmtrain.protocol import EVENT_RANKS_CONNECTING, ConnectingRank, ConnectingWorld, Event

_EVENT_INTERVAL_SECONDS = 10.0
"""Minimum seconds between two events about the ranks that wait."""


class ConnectingRanks:
    """The ranks of the newest world that wait. A rank reports itself repeatedly while it waits, and once when it has connected."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, ConnectingRank] = {}
        self._newest_report: ConnectingRank | None = None
        self._last_arrival_at = 0.0
        self._published: dict[int, ConnectingRank] = {}
        self._next_event_at = float("-inf")

    def record_rank(self, report: ConnectingRank) -> ConnectingWorld:
        """Record the report of a rank. Return the state of its world."""
        if self._newest_report is None or report.world != self._newest_report.world:
            self._waiting = {}
        self._newest_report = report
        if not report.waits:
            self._waiting.pop(report.rank, None)
        elif report.rank not in self._waiting:
            self._waiting[report.rank] = report
            self._last_arrival_at = self._clock()
        return ConnectingWorld(len(self._waiting), self._clock() - self._last_arrival_at)

    def take_event(self) -> Event | None:
        """Return the event to publish, if the set of ranks that wait has changed and the last event is old enough."""
        if self._newest_report is None or self._waiting == self._published or self._clock() < self._next_event_at:
            return None
        self._published, self._next_event_at = dict(self._waiting), self._clock() + _EVENT_INTERVAL_SECONDS
        ranks: dict[str, list[int]] = {}
        for rank, report in sorted(self._waiting.items()):
            ranks.setdefault(report.node, []).append(rank)
        world = {name: getattr(self._newest_report, name) for name in ("world", "world_size", "address")}
        return Event(EVENT_RANKS_CONNECTING, {**world, "ranks": ranks})
