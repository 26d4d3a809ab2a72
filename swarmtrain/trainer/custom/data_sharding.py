"""Shard the samples of a DataLoader over any number of ranks, starting at any step; read data that cannot be sharded one batch ahead.

The samples of step k of an epoch, and their order, are a function of (seed, epoch, k), independent of the number of ranks. Of the samples
of a step, rank r of n receives those at indices r, r + n, r + 2n …, so with half as many ranks each rank receives twice as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import shuffle
from swarmtrain.trainer.random_seeds import seed_everything

_SampleKey = tuple[int, int]
"""Epoch, and index of a sample in the dataset."""
_HINT = "or pass the batches themselves to steps(): steps(iter(loader)) skips batches that were already seen"


class ShardedLoader:
    """One rank's shard of the dataset of `loader`."""

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, seed: int, global_batch_size: int | None) -> None:
        """Rebuild `loader`, so that it reads only the samples of rank `rank` of `world_size`. `seed` determines the sample order.

        `global_batch_size`: samples per step on all ranks together; None: the loader's batch_size times `world_size`. Raises TrainingError
        if the loader cannot be sharded.
        """
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self.sample_count = len(loader.dataset)  # type: ignore[arg-type]  # a map-style dataset, which has a length
        self._is_shuffled = _has_shuffling_sampler(loader, self.sample_count)
        self.global_batch_size = global_batch_size or (loader.batch_size or 1) * world_size
        if self.global_batch_size < world_size or self.sample_count < world_size:
            fewer = min(self.global_batch_size, self.sample_count)
            raise TrainingError(
                f"{world_size} ranks need at least {world_size} samples per step, but there are only {fewer}",
                place="steps",
                hint="use larger batches, or fewer ranks",
            )
        self.steps_per_epoch = (
            self.sample_count // self.global_batch_size if loader.drop_last else -(-self.sample_count // self.global_batch_size)
        )
        if not self.steps_per_epoch:
            raise TrainingError(f"drop_last discards all {self.sample_count} samples", place="steps", hint="use smaller batches")
        self._rank_batches: list[list[_SampleKey]] = []
        self._loader = _rebuild_loader(loader, self._rank_batches, seed)

    def iterate_batches(self, steps_done: int) -> Iterator[tuple[Any, float]]:
        """Yield this rank's remaining batches of the current epoch, each with its loss weight.

        `steps_done`: number of completed steps in all epochs. If ranks have equal numbers of samples, all loss weights are 1; in any case,
        the weights of all ranks in a step sum to the number of ranks.
        """
        epoch, first_step = divmod(steps_done, self.steps_per_epoch)
        assignments = [self._assign_samples(epoch, number) for number in range(first_step, self.steps_per_epoch)]
        self._rank_batches[:] = [[(epoch, sample) for sample in samples] for samples, _ in assignments]
        for local_batch, (_, weight) in zip(self._loader, assignments, strict=True):
            yield local_batch, weight

    def _assign_samples(self, epoch: int, step_in_epoch: int) -> tuple[list[int], float]:
        """Return this rank's sample indices in step `step_in_epoch` of an epoch, and the loss weight of its batch.

        If there are fewer samples than ranks, a rank without samples receives a sample of another rank, with weight 0.
        """
        first = step_in_epoch * self.global_batch_size
        count = min(self.global_batch_size, self.sample_count - first)
        stream_position = epoch * self.sample_count + first
        ids = (
            shuffle.compute_sample_ids(stream_position, count, self.sample_count, self._seed)
            if self._is_shuffled
            else np.arange(first, first + count)
        )
        local_ids = ids[self._rank :: self._world_size]
        if not len(local_ids):
            return [int(ids[self._rank % count])], 0.0
        return local_ids.tolist(), len(local_ids) * self._world_size / count


class _SeededDataset(Dataset[Any]):
    """Dataset that seeds the random number generators for each sample, as a function of (seed, epoch, sample).

    Random augmentation of a sample is therefore independent of the rank, of the worker process, and of previously read samples.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._data, self._seed = dataset, seed
        if hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._get_items

    def __getitem__(self, key: _SampleKey) -> Any:
        epoch, sample = key
        seed_everything(self._seed, "sample", epoch, sample)
        return self._data[sample]

    def _get_items(self, sample_keys: list[_SampleKey]) -> Any:
        """Return the samples of `sample_keys`. Samples that are read together share the seed of the first sample."""
        epoch, sample = sample_keys[0]
        seed_everything(self._seed, "sample", epoch, sample)
        return self._data.__getitems__([sample for _, sample in sample_keys])  # type: ignore[attr-defined]


def can_shard_loader(loader: DataLoader[Any]) -> bool:
    """Return whether the dataset of `loader` is map-style, so that its samples can be indexed."""
    return not isinstance(loader.dataset, IterableDataset)


def _has_shuffling_sampler(loader: DataLoader[Any], sample_count: int) -> bool:
    sampler = loader.sampler
    if loader.batch_size is None:
        raise TrainingError(
            "does not support a DataLoader with a custom batch_sampler", place="steps", hint=f"use batch_size and shuffle; {_HINT}"
        )
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == sample_count:
        return True
    raise TrainingError(
        f"does not support a DataLoader whose sampler is a {type(sampler).__name__}",
        place="steps",
        hint=f"use shuffle=True or shuffle=False; {_HINT}",
    )


def _rebuild_loader(loader: DataLoader[Any], rank_batches: list[list[_SampleKey]], seed: int) -> DataLoader[Any]:
    """Return a copy of `loader` that reads the batches in `rank_batches`, a list that the caller updates before each epoch."""
    return DataLoader(
        _SeededDataset(loader.dataset, seed),
        batch_sampler=rank_batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers and loader.num_workers > 0,
    )


class BatchPrefetcher:
    """Reads the batches of one epoch on one rank, one batch ahead, from data that cannot be sharded: each rank reads its own data.

    So each rank knows before a step ends whether it has a next batch. Ranks may have unequal numbers of batches. An epoch lasts until no
    rank has a next batch: until then, a rank without batches repeats its last batch with loss weight 0, so that all ranks take part in
    collectives. torch's Join does the same for DistributedDataParallel, but needs a join hook in each participating object.
    """

    def __init__(self, data: Iterable[Any], before_read: Callable[[int], None]) -> None:
        """Read the first batch of `data`. `before_read` is called before each batch is read, with the index of this batch."""
        self._before_read, self._number = before_read, 0
        before_read(0)
        self._iterator = iter(data)
        self._last_batch: Any = None
        self.has_next = True
        """Whether there is a batch that take_batch() has not returned yet."""
        self._next_batch: Any = None
        self._prefetch_next_batch()

    def take_batch(self) -> tuple[Any, bool]:
        """Return the next batch and True. After the end of the data, return the last batch again and False."""
        if not self.has_next:
            return self._last_batch, False
        self._last_batch = self._next_batch
        self._prefetch_next_batch()
        return self._last_batch, True

    def skip_batches(self, limit: int) -> int:
        """Skip up to `limit` batches, and return how many were skipped."""
        skipped = 0
        while skipped < limit and self.has_next:
            self.take_batch()
            skipped += 1
        return skipped

    def _prefetch_next_batch(self) -> None:
        self._number += 1
        self._before_read(self._number)
        try:
            self._next_batch = next(self._iterator)
        except StopIteration:
            self._next_batch, self.has_next = None, False
