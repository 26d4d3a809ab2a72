"""What one rank reads of data that cannot be dealt out, a batch ahead: whether there is a next one is known before a step is over.

Ranks may have unequally many batches. An epoch lasts until none has any: who has none left sees its last one again, which weighs
nothing, so that collectives find everybody (Join, as torch's DistributedDataParallel has it, without its hooks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class Reading:
    """One epoch of one rank's data."""

    def __init__(self, data: Iterable[Any], before: Callable[[int], None]) -> None:
        """`before` is called before each batch is read, with its number."""
        self._before, self._number = before, 0
        before(0)
        self._left = iter(data)
        self._last: Any = None
        self.is_left = True
        """Whether there is a batch that was not taken yet."""
        self._next: Any = None
        self._look()

    def take(self) -> tuple[Any, bool]:
        """Return the next batch and True; at the end of the data the last one again, and False."""
        if not self.is_left:
            return self._last, False
        self._last = self._next
        self._look()
        return self._last, True

    def pass_over(self, most: int) -> int:
        """Take up to `most` batches, and return how many there were."""
        passed = 0
        while passed < most and self.is_left:
            self.take()
            passed += 1
        return passed

    def _look(self) -> None:
        self._number += 1
        self._before(self._number)
        try:
            self._next = next(self._left)
        except StopIteration:
            self._next, self.is_left = None, False
