"""A DataLoader's samples, dealt out to the ranks of whatever world there is, from any point on.

The samples of step k of an epoch are the same in every world, and in the same order: a function of (seed, epoch, k).
Rank r of n gets those at r, r + n, r + 2n …, so with half as many ranks each has twice as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import runtime
from swarmtrain.trainer.data import order

_Key = tuple[int, int]
"""An epoch, and a sample."""
_HINT = "or give steps() the batches themselves: steps(iter(loader)) skips those that were seen"


class Dealt:
    """What one rank reads of `loader`'s data set."""

    def __init__(self, loader: DataLoader[Any], rank: int, size: int, seed: int, batch: int | None) -> None:
        """`batch`: samples of a step, of all ranks together; None: the loader's batch_size times `size`.

        Raises TrainingError if the loader is of a kind that cannot be dealt out.
        """
        self._rank, self._size, self._seed = rank, size, seed
        self.samples = len(loader.dataset)  # type: ignore[arg-type]  # of a kind that has a length
        self._shuffled = _shuffled(loader, self.samples)
        self.batch = batch or (loader.batch_size or 1) * size
        if self.batch < size or self.samples < size:
            fewer = min(self.batch, self.samples)
            raise TrainingError(f"{size} ranks cannot share {fewer} samples", place="steps", hint="larger batches, or fewer ranks")
        self.per_epoch = self.samples // self.batch if loader.drop_last else -(-self.samples // self.batch)
        if not self.per_epoch:
            raise TrainingError(f"drop_last leaves nothing of {self.samples} samples", place="steps", hint="smaller batches")
        self._shares: list[list[_Key]] = []
        self._loader = _again(loader, self._shares, seed)

    def batches(self, done: int) -> Iterator[tuple[Any, float]]:
        """Yield the rest of an epoch after `done` steps in all: each step's batch, and what this rank's mean of it weighs.

        Weights are 1 where ranks have equally many samples; over all ranks they add up to their number.
        """
        epoch, begun = divmod(done, self.per_epoch)
        shares = [self._share(epoch, number) for number in range(begun, self.per_epoch)]
        self._shares[:] = [[(epoch, sample) for sample in share] for share, _ in shares]
        for given, (_, weight) in zip(self._loader, shares, strict=True):
            yield given, weight

    def _share(self, epoch: int, number: int) -> tuple[list[int], float]:
        """Return this rank's samples of a step, and its weight. One without any sees another's, which then weighs nothing."""
        first = number * self.batch
        count = min(self.batch, self.samples - first)
        where = epoch * self.samples + first
        ids = order.samples(where, count, self.samples, self._seed) if self._shuffled else np.arange(first, first + count)
        mine = ids[self._rank :: self._size]
        if not len(mine):
            return [int(ids[self._rank % count])], 0.0
        return mine.tolist(), len(mine) * self._size / count


class _Samples(Dataset[Any]):
    """A data set each of whose samples is made with random numbers of its own, a function of (seed, epoch, sample).

    So what is changed at random is changed alike whichever rank and worker reads it, and after whatever was read before.
    """

    def __init__(self, data: Dataset[Any], seed: int) -> None:
        self._data, self._seed = data, seed
        if hasattr(data, "__getitems__"):
            self.__getitems__ = self._together

    def __getitem__(self, key: _Key) -> Any:
        epoch, sample = key
        runtime.seed(self._seed, "sample", epoch, sample)
        return self._data[sample]

    def _together(self, keys: list[_Key]) -> Any:
        """Samples that are made together have one row of numbers, that of the first."""
        epoch, sample = keys[0]
        runtime.seed(self._seed, "sample", epoch, sample)
        return self._data.__getitems__([sample for _, sample in keys])  # type: ignore[attr-defined]


def can_deal(loader: DataLoader[Any]) -> bool:
    """Return whether the samples of `loader` have numbers."""
    return not isinstance(loader.dataset, IterableDataset)


def _shuffled(loader: DataLoader[Any], samples: int) -> bool:
    sampler = loader.sampler
    if loader.batch_size is None:
        raise TrainingError("a DataLoader with a batch_sampler of its own", place="steps", hint=f"batch_size and shuffle; {_HINT}")
    if isinstance(sampler, DistributedSampler):
        return bool(sampler.shuffle)
    if isinstance(sampler, SequentialSampler):
        return False
    if isinstance(sampler, RandomSampler) and not sampler.replacement and sampler.num_samples == samples:
        return True
    raise TrainingError(f"a DataLoader whose sampler is a {type(sampler).__name__}", place="steps", hint=f"shuffle=True or False; {_HINT}")


def _again(loader: DataLoader[Any], shares: list[list[_Key]], seed: int) -> DataLoader[Any]:
    """Return a loader as `loader`, which reads the `shares` that there are when it is iterated."""
    return DataLoader(
        _Samples(loader.dataset, seed),
        batch_sampler=shares,
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
