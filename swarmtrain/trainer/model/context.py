"""Where a rank has only a part of each sequence: which part, and how it comes by the rest. Parallelism fills this in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Context(Protocol):
    """The ranks that share sequences, as one of them sees them."""

    size: int
    """Ranks that share each sequence."""

    def places(self, length: int, device: torch.device) -> Tensor | None:
        """Return the places, in sequences of `length`, of the tokens that this rank has; None: all."""


Gather = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Makes keys and values (batch, head, sequence, dimension) of this rank's part of each sequence those of the whole."""
