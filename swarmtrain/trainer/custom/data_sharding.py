"""The samples of a DataLoader, sharded over the ranks of the current world, from any step.

The samples of step k of an epoch are the same in every world, and in the same order: a function of (seed, epoch, k).
Rank r of n gets those at r, r + n, r + 2n …, so with half as many ranks each has twice as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import shuffle
from swarmtrain.trainer.runtime import seed_everything

_SampleKey = tuple[int, int]
"""An epoch, and the index of a sample."""
_HINT = "or give steps() the batches themselves: steps(iter(loader)) skips those that were seen"


class ShardedLoader:
    """One rank's shard of `loader`'s dataset."""

    def __init__(self, loader: DataLoader[Any], rank: int, world_size: int, seed: int, global_batch_size: int | None) -> None:
        """`global_batch_size`: samples per step, on all ranks together; None: the loader's batch_size times `world_size`.

        Raises TrainingError if the loader cannot be sharded.
        """
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self.sample_count = len(loader.dataset)  # type: ignore[arg-type]  # a map-style dataset, which has a length
        self._is_shuffled = _has_shuffling_sampler(loader, self.sample_count)
        self.global_batch_size = global_batch_size or (loader.batch_size or 1) * world_size
        if self.global_batch_size < world_size or self.sample_count < world_size:
            fewer = min(self.global_batch_size, self.sample_count)
            raise TrainingError(f"{world_size} ranks cannot divide {fewer} samples", place="steps", hint="larger batches, or fewer ranks")
        self.steps_per_epoch = (
            self.sample_count // self.global_batch_size if loader.drop_last else -(-self.sample_count // self.global_batch_size)
        )
        if not self.steps_per_epoch:
            raise TrainingError(f"drop_last leaves nothing of {self.sample_count} samples", place="steps", hint="smaller batches")
        self._rank_batches: list[list[_SampleKey]] = []
        self._loader = _rebuild_loader(loader, self._rank_batches, seed)

    def iterate_batches(self, steps_done: int) -> Iterator[tuple[Any, float]]:
        """Yield the rest of an epoch after `steps_done` steps in all: each step's batch on this rank, and the weight of its mean loss.

        Weights are 1 if ranks have equally many samples; over all ranks they sum to the number of ranks.
        """
        epoch, first_step = divmod(steps_done, self.steps_per_epoch)
        assignments = [self._assign_samples(epoch, number) for number in range(first_step, self.steps_per_epoch)]
        self._rank_batches[:] = [[(epoch, sample) for sample in samples] for samples, _ in assignments]
        for local_batch, (_, weight) in zip(self._loader, assignments, strict=True):
            yield local_batch, weight

    def _assign_samples(self, epoch: int, number: int) -> tuple[list[int], float]:
        """Return this rank's samples of a step, and its weight. A rank without samples gets another rank's, with weight 0."""
        first = number * self.global_batch_size
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
    """A dataset that seeds random number generators for each sample, as a function of (seed, epoch, sample).

    So random augmentation of a sample does not depend on the rank and worker that read it, nor on what they read before.
    """

    def __init__(self, data: Dataset[Any], seed: int) -> None:
        self._data, self._seed = data, seed
        if hasattr(data, "__getitems__"):
            self.__getitems__ = self._get_items

    def __getitem__(self, key: _SampleKey) -> Any:
        epoch, sample = key
        seed_everything(self._seed, "sample", epoch, sample)
        return self._data[sample]

    def _get_items(self, keys: list[_SampleKey]) -> Any:
        """Samples that are read together share one seed, that of the first."""
        epoch, sample = keys[0]
        seed_everything(self._seed, "sample", epoch, sample)
        return self._data.__getitems__([sample for _, sample in keys])  # type: ignore[attr-defined]


def can_shard(loader: DataLoader[Any]) -> bool:
    """Return whether the samples of `loader` can be indexed."""
    return not isinstance(loader.dataset, IterableDataset)


def _has_shuffling_sampler(loader: DataLoader[Any], sample_count: int) -> bool:
    sampler = loader.sampler
    if loader.batch_size is None:
        raise TrainingError("a DataLoader with a batch_sampler of its own", place="steps", hint=f"batch_size and shuffle; {_HINT}")
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == sample_count:
        return True
    raise TrainingError(f"a DataLoader whose sampler is a {type(sampler).__name__}", place="steps", hint=f"shuffle=True or False; {_HINT}")


def _rebuild_loader(loader: DataLoader[Any], rank_batches: list[list[_SampleKey]], seed: int) -> DataLoader[Any]:
    """Return a copy of `loader` that reads the `rank_batches` present when it is iterated."""
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
