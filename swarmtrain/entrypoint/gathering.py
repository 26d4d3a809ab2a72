"""When the nodes of a rendezvous round begin: together, so that the first does not form a world that ends as the next one comes.

Pure: time comes through `now` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Set

PATIENCE = 60.0
"""Seconds after which those that have come begin without the others."""
YOUNG = 2.5
"""Seconds in which a board that has just started may not have heard of all that live: they beat every second."""


class Gathering:
    """Who has come to the round that is about to begin, and who is on the way: announced, or left over from the last one."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._announced: dict[str, float] = {}
        self._born = now()
        self._round = ""
        self._come: set[str] = set()
        self._since = 0.0

    def announce(self, name: str) -> None:
        """A node's supervisor has started; its torch takes seconds to import."""
        self._announced[name] = self._now()
        self._come.discard(name)

    def come(self, round: str, name: str, others: Set[str]) -> bool:
        """A node is ready for `round`; return whether it is to begin. `others` are alive, and will come unless they have."""
        if round != self._round:
            self._round, self._come, self._since = round, set(), self._now()
        self._come.add(name)
        self._announced.pop(name, None)
        announced = {other for other, time in self._announced.items() if self._now() - time <= PATIENCE}
        complete = self._now() - self._born > YOUNG and (others | announced) <= self._come
        return complete or self._now() - self._since > PATIENCE

    def leave(self, name: str) -> None:
        """A node has gone again."""
        self._announced.pop(name, None)
