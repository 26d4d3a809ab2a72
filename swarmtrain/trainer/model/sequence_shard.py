"""Interface for context parallelism, used when a rank has only a part of each sequence.

The implementation is in trainer/parallel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class SequenceShard(Protocol):
    """Interface that selects the part of each sequence that this rank processes."""

    size: int
    """Number of ranks that share each sequence."""

    def select_ranges(self, length: int) -> tuple[range, ...] | None:
        """Return the positions of this rank's tokens in sequences of `length` tokens; None if this rank has all tokens."""


KeyValueGather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps this rank's keys and values (batch, head, sequence, head size) to the keys and values of the full sequence."""
