"""Post events to the coordinator in a background thread, so that training never waits for the network.

Only the latest progress event is queued: if the coordinator is slow, older progress events are dropped. All other events stay in the
queue until they are posted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import Event
from swarmtrain.protocol.coordinator_client import CoordinatorClient

LOG = logging.getLogger("swarmtrain")
_INTERVAL_SECONDS = 0.5
"""Minimum seconds between two posts of progress events."""


class EventSender:
    """Posts events to the coordinator at `address` (host:port)."""

    def __init__(self, address: str) -> None:
        self._coordinator = CoordinatorClient(address)
        self._queue: deque[Event] = deque()
        self._latest_progress: Event | None = None
        self._close_deadline: float | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._post_events_until_closed, name="event-poster", daemon=True)
        self._thread.start()

    def queue_event(self, event: Event) -> None:
        """Queue `event` for posting. It stays in the queue until the coordinator has received it."""
        with self._wake:
            self._queue.append(event)
            self._wake.notify()

    def queue_progress_event(self, event: Event) -> None:
        """Queue `event`, a progress event, for posting. It replaces an earlier progress event that is still queued."""
        with self._wake:
            self._latest_progress = event

    def close(self, timeout: float) -> None:
        """Post the queued events, and stop the thread after at most about `timeout` seconds."""
        with self._wake:
            self._close_deadline = time.monotonic() + timeout
            self._wake.notify()
        self._thread.join(timeout + self._coordinator.timeout)

    def _post_events_until_closed(self) -> None:
        while True:
            with self._wake:
                if not self._queue and self._close_deadline is None:
                    self._wake.wait(_INTERVAL_SECONDS)
                deadline, latest, self._latest_progress = self._close_deadline, self._latest_progress, None
                if latest is not None:
                    self._queue.append(latest)
            if self._post_queued_events() and deadline is not None:
                return
            if deadline is not None and time.monotonic() > deadline:
                LOG.warning("coordinator %s: unreachable, %d events lost", self._coordinator.address, len(self._queue))
                return

    def _post_queued_events(self) -> bool:
        while self._queue:
            try:
                self._coordinator.post_event(self._queue[0])
            except CoordinatorError as error:
                LOG.debug("%s", error)
                self._drop_progress_event()
                time.sleep(_INTERVAL_SECONDS)
                return False
            self._queue.popleft()
        return True

    def _drop_progress_event(self) -> None:
        with self._wake:
            self._queue = deque(event for event in self._queue if event.kind != "progress")
