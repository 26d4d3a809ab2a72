"""Loading in a thread, one micro batch ahead of its use, so that training does not wait for the disk."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.token_batch import TokenBatch


class BackgroundLoader:
    """Calls `load` with sample ids, in a thread if the ids are known before the samples are needed. Use it in one thread."""

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
