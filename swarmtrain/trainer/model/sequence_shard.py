"""The interface for a rank with only a part of each sequence: which part, and how it gathers the rest. trainer/parallel implements it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class SequenceShard(Protocol):
    """The ranks that share each sequence, as seen by one of them."""

    size: int
    """Number of ranks that share each sequence."""

    def select_positions(self, length: int, device: torch.device) -> Tensor | None:
        """Return the positions, in sequences of `length`, of this rank's tokens; None: all."""


KeyValueGather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps keys and values (batch, head, sequence, dimension) of this rank's part of each sequence to those of the whole sequence."""
