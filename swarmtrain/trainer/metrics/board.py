"""Events to the notice board, from a thread: training never waits for the network.

Progress is only ever the latest: what the board is too slow for is dropped. Everything else is kept until it is posted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from swarmtrain.board import Board
from swarmtrain.errors import BoardError
from swarmtrain.wire import Event

LOG = logging.getLogger("swarmtrain")
_EVERY = 0.5
"""Seconds between two posts of progress."""


class Poster:
    """Posts to the board at `address` (host:port)."""

    def __init__(self, address: str) -> None:
        self._board = Board(address)
        self._kept: deque[Event] = deque()
        self._progress: Event | None = None
        self._closing_at: float | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="notice-board", daemon=True)
        self._thread.start()

    def post(self, event: Event) -> None:
        """Post `event` soon; it is kept until the board has it."""
        with self._wake:
            self._kept.append(event)
            self._wake.notify()

    def progress(self, event: Event) -> None:
        """Post `event`, unless a newer one comes before its turn."""
        with self._wake:
            self._progress = event

    def close(self, within: float) -> None:
        """Post what is left, for at most `within` seconds."""
        with self._wake:
            self._closing_at = time.monotonic() + within
            self._wake.notify()
        self._thread.join(within + self._board.timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._kept and self._closing_at is None:
                    self._wake.wait(_EVERY)
                closing_at, latest, self._progress = self._closing_at, self._progress, None
                if latest is not None:
                    self._kept.append(latest)
            if self._post_all() and closing_at is not None:
                return
            if closing_at is not None and time.monotonic() > closing_at:
                LOG.warning("notice board %s: not reached, %d events lost", self._board.address, len(self._kept))
                return

    def _post_all(self) -> bool:
        while self._kept:
            try:
                self._board.post(self._kept[0])
            except BoardError as error:
                LOG.debug("%s", error)
                self._drop_progress()
                time.sleep(_EVERY)
                return False
            self._kept.popleft()
        return True

    def _drop_progress(self) -> None:
        with self._wake:
            self._kept = deque(event for event in self._kept if event.kind != "progress")
