"""Where a rank has only a part of each sequence: which part, and how it comes by the rest. Parallelism fills this in."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Context(Protocol):
    """The ranks that share sequences, as one of them sees them."""

    size: int
    """Ranks that share each sequence."""

    def places(self, length: int, device: torch.device) -> Tensor:
        """Return the places, in sequences of `length`, of the tokens that this rank has."""

    def gather(self, heads: Tensor) -> Tensor:
        """Return `heads` (batch, head, sequence, dimension) of the whole sequence, of which this rank gives its part."""
