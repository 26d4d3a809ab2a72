"""Prefetch of data that cannot be sharded: each rank reads its own data one batch ahead.

So each rank knows before a step ends whether it has a next batch. Ranks may have unequal numbers of batches. An epoch lasts until no rank
has a next batch: until then, a rank without batches repeats its last batch with loss weight 0, so that all ranks take part in collectives.
torch's Join does the same for DistributedDataParallel, but needs a join hook in each participating object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class BatchPrefetcher:
    """Reads the batches of one epoch on one rank, one batch ahead."""

    def __init__(self, data: Iterable[Any], before_read: Callable[[int], None]) -> None:
        """Read the first batch of `data`. `before_read` is called before each batch is read, with the index of this batch."""
        self._before_read, self._number = before_read, 0
        before_read(0)
        self._iterator = iter(data)
        self._last_batch: Any = None
        self.has_next = True
        """Whether there is a batch that take_batch() has not returned yet."""
        self._next_batch: Any = None
        self._prefetch_next_batch()

    def take_batch(self) -> tuple[Any, bool]:
        """Return the next batch and True. After the end of the data, return the last batch again and False."""
        if not self.has_next:
            return self._last_batch, False
        self._last_batch = self._next_batch
        self._prefetch_next_batch()
        return self._last_batch, True

    def skip_batches(self, limit: int) -> int:
        """Skip up to `limit` batches, and return how many were skipped."""
        skipped = 0
        while skipped < limit and self.has_next:
            self.take_batch()
            skipped += 1
        return skipped

    def _prefetch_next_batch(self) -> None:
        self._number += 1
        self._before_read(self._number)
        try:
            self._next_batch = next(self._iterator)
        except StopIteration:
            self._next_batch, self.has_next = None, False
