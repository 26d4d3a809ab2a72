"""The order of samples: a function of (seed, epoch, position) alone, so it is the same in every world and seeks at once.

A permutation of n samples with no memory: a six-round Feistel network over the next power of four, and whatever falls
outside n is sent through again until it falls inside (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary
finite domains"). That power is at most four times n, so fewer than four passes are needed on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.runtime import derived_seed

_ROUNDS = 6


def samples(position: int, count: int, size: int, seed: int) -> Ids:
    """Return the ids of the `count` samples from global `position` on, of a data set of `size` samples.

    Positions count through all epochs; within an epoch each sample comes once.
    """
    return at(np.arange(position, position + count, dtype=np.int64), size, seed)


def at(positions: Ids, size: int, seed: int) -> Ids:
    """Return the ids of the samples at `positions`."""
    epochs = positions // size
    ids = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        ids[chosen] = permuted(positions[chosen] - epoch * size, size, derived_seed("order", seed, int(epoch)))
    return ids


def permuted(indices: Ids, size: int, key: int) -> Ids:
    """Return where a permutation of 0..size-1, chosen by `key`, sends `indices`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.array([derived_seed(key, number) for number in range(_ROUNDS)], dtype=np.uint64)
    values = _feistel(indices.astype(np.uint64), half, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half, keys)
    return values.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half) - 1), np.uint64(half)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
