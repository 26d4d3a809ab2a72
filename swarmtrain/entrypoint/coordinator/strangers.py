"""Bounds what clients without the run's key cost the coordinator: their connections, and lines of its log.

Pure: time comes from `clock` (seconds, monotonic).
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MAX_CONNECTIONS_PER_ADDRESS = 256
"""More than the ranks of a machine, which may all report to the coordinator at once."""
_MAX_CONNECTIONS = 8192
"""More than the ranks of 1,000 machines, which all report the loss of a peer at once."""
_REPORT_INTERVALS_SECONDS = (60.0, 3600.0)
"""Seconds between the first two reports of refused requests, and the longest interval. Each interval is twice the one before."""
_MAX_COUNTED_ADDRESSES = 1000


class UnverifiedConnections:
    """Connections with no verified request yet, bounded per address and in total.

    A new connection beyond a bound closes the oldest one: requests of the run's own processes are verified within milliseconds.
    """

    def __init__(self, max_per_address: int = _MAX_CONNECTIONS_PER_ADDRESS, max_total: int = _MAX_CONNECTIONS) -> None:
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_per_address, self._max_total = max_per_address, min(max_total, open_files // 2)
        self._connections: dict[int, tuple[str, Callable[[], None]]] = {}
        """Address and close function of each connection, by its number, the oldest first."""
        self._numbers_by_address: dict[str, dict[int, None]] = {}
        self._next_number = 0

    @contextmanager
    def track(self, address: str, close: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Count a connection from `address` as unverified until the yielded function is called, or the block ends.

        `close` closes the connection.
        """
        number = self._next_number
        self._next_number += 1
        if len(self._numbers_by_address.get(address, ())) >= self._max_per_address:
            self._close_connection(next(iter(self._numbers_by_address[address])))
        elif len(self._connections) >= self._max_total:
            self._close_connection(next(iter(self._connections)))
        self._connections[number] = address, close
        self._numbers_by_address.setdefault(address, {})[number] = None
        try:
            yield lambda: self._forget_connection(number)
        finally:
            self._forget_connection(number)

    def _close_connection(self, number: int) -> None:
        _, close = self._connections[number]
        self._forget_connection(number)
        close()

    def _forget_connection(self, number: int) -> None:
        if number in self._connections:
            address, _ = self._connections.pop(number)
            del self._numbers_by_address[address][number]
            if not self._numbers_by_address[address]:
                del self._numbers_by_address[address]


class RefusedRequests:
    """Counts refused requests. The intervals between reports grow, so that strangers cannot fill the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._count = 0
        self._addresses: dict[str, None] = {}
        self._next_report_at, self._interval = float("-inf"), _REPORT_INTERVALS_SECONDS[0]

    def record_refusal(self, address: str) -> None:
        """Count a refused request from `address`."""
        self._count += 1
        if len(self._addresses) < _MAX_COUNTED_ADDRESSES:
            self._addresses[address] = None

    def take_report(self) -> str | None:
        """Return a report of the requests refused since the last report; None if there are none, or the next report is not due yet."""
        if not self._count or self._clock() < self._next_report_at:
            return None
        self._next_report_at = self._clock() + self._interval
        self._interval = min(2 * self._interval, _REPORT_INTERVALS_SECONDS[1])
        first_address, *other_addresses = self._addresses
        requests, verb = ("1 request", "is") if self._count == 1 else (f"{self._count:,} requests", "are")
        others = {0: "", 1: " and another address"}.get(len(other_addresses), f" and {len(other_addresses)} other addresses")
        self._count = 0
        self._addresses.clear()
        return f"refused {requests} from {first_address}{others} that {verb} not signed with the run's key"
