"""Samples as the model takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Samples as the model takes them: int64 tensors (samples, sequence_length)."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None
    """For each input the number of its document within the sample, from 0 on; None where the model does not ask."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Return the same with `change` made to each tensor."""
        return Rows(change(self.inputs), change(self.targets), None if self.documents is None else change(self.documents))
