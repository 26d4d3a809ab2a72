"""Batch of samples: inputs and targets of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class TokenBatch(NamedTuple):
    """Batch of samples: inputs, targets and document ids, as int64 tensors (samples, sequence length)."""

    inputs: Tensor
    targets: Tensor
    document_ids: Tensor | None = None
    """For each input, the index of its document within the sample, from 0; None if the model does not separate documents."""

    def interleave_with(self, others: Sequence[TokenBatch]) -> TokenBatch:
        """Return a batch in which each sample is followed by the samples with the same index from each of `others`."""
        columns = zip(self, *others, strict=True)
        return TokenBatch(*(None if column[0] is None else torch.stack(column, 1).flatten(0, 1) for column in columns))  # type: ignore[arg-type]

    def append(self, others: Sequence[TokenBatch]) -> TokenBatch:
        """Return a batch of the samples of this batch, followed by those of `others`."""
        columns = zip(self, *others, strict=True)
        return TokenBatch(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def map_tensors(self, transform: Callable[[Tensor], Tensor]) -> TokenBatch:
        """Return the batch after applying `transform` to each tensor."""
        return TokenBatch(
            transform(self.inputs), transform(self.targets), None if self.document_ids is None else transform(self.document_ids)
        )
