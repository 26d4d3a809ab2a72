"""Samples as model inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenBatch(NamedTuple):
    """Samples as model inputs: int64 tensors (samples, sequence_length)."""

    inputs: Tensor
    targets: Tensor
    document_ids: Tensor | None = None
    """For each input the number of its document within the sample, from 0; None if the model does not need it."""

    def interleave_with(self, others: Sequence[TokenBatch]) -> TokenBatch:
        """Return each sample followed by the samples of `others` with the same number, in their order."""
        columns = zip(self, *others, strict=True)
        return TokenBatch(*(None if column[0] is None else torch.stack(column, 1).flatten(0, 1) for column in columns))  # type: ignore[arg-type]

    def map_tensors(self, transform: Callable[[Tensor], Tensor]) -> TokenBatch:
        """Return the batch with `transform` applied to each tensor."""
        return TokenBatch(
            transform(self.inputs), transform(self.targets), None if self.document_ids is None else transform(self.document_ids)
        )
