"""Batch of samples: inputs and targets of the model, loaded one micro batch ahead of its use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from swarmtrain.trainer.data.memory_map import Ids


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


class BackgroundLoader:
    """Calls `load` with sample ids, in a thread if the ids are known early, so that training does not wait for the disk.

    Use it in one thread.
    """

    def __init__(self, load: Callable[[Ids], TokenBatch]) -> None:
        self._load = load
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="swarmtrain-samples")
        self._pending: tuple[Ids, Future[TokenBatch]] | None = None

    def start_loading(self, sample_ids: Ids) -> None:
        """Start loading the samples `sample_ids` in the background, for the next call of `load_samples`."""
        self._cancel_pending_load()
        self._pending = sample_ids, self._executor.submit(self._load, sample_ids)

    def load_samples(self, sample_ids: Ids) -> TokenBatch:
        """Return the samples `sample_ids`. Raises what `load` raises for them. Samples of other ids that are being loaded are discarded."""
        if self._pending is None or not np.array_equal(self._pending[0], sample_ids):
            self._cancel_pending_load()
            return self._load(sample_ids)
        (_, future), self._pending = self._pending, None
        return future.result()

    def _cancel_pending_load(self) -> None:
        if self._pending is not None:
            self._pending[1].cancel()
            self._pending = None
