"""Samples as the model takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Samples as the model takes them: int64 tensors (samples, sequence_length)."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None
    """For each input the number of its document within the sample, from 0 on; None where the model does not ask."""

    def alternating(self, others: Sequence[Rows]) -> Rows:
        """Return each sample followed by those of `others`, in their order, that have its number."""
        columns = zip(self, *others, strict=True)
        return Rows(*(None if column[0] is None else torch.stack(column, 1).flatten(0, 1) for column in columns))  # type: ignore[arg-type]

    def map(self, change: Callable[[Tensor], Tensor]) -> Rows:
        """Return the same with `change` made to each tensor."""
        return Rows(change(self.inputs), change(self.targets), None if self.documents is None else change(self.documents))
