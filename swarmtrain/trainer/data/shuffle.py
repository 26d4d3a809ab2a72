"""Shuffling: the sample order is a function of (seed, epoch, position) alone.

So the order is independent of the topology, and resuming at any position takes constant time. The permutation of n samples needs no
table: it is a six-round Feistel network over 0..m-1, where m is the next power of four. Results of n or more are permuted again until
they are less than n (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Since m is at most 4 n, fewer than
four iterations are needed on average.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.random_seeds import derive_seed

_ROUNDS = 6


def compute_sample_ids(position: int, sample_count: int, dataset_size: int, seed: int) -> Ids:
    """Return the ids of `sample_count` consecutive samples, from `position`, in the shuffled order of `dataset_size` samples.

    Positions are counted over all epochs. Each epoch contains every sample once, in a different order.
    """
    return shuffle_positions(np.arange(position, position + sample_count, dtype=np.int64), dataset_size, seed)


def shuffle_positions(positions: Ids, dataset_size: int, seed: int) -> Ids:
    """Return the sample ids at `positions` in the shuffled order of a data set with `dataset_size` samples."""
    epochs = positions // dataset_size
    ids = np.empty(len(positions), dtype=np.int64)
    for epoch in np.unique(epochs):
        in_epoch = epochs == epoch
        ids[in_epoch] = permute_indices(positions[in_epoch] - epoch * dataset_size, dataset_size, derive_seed("order", seed, int(epoch)))
    return ids


def permute_indices(indices: Ids, size: int, key: int) -> Ids:
    """Apply a permutation of 0..size-1, determined by `key`, to each of `indices`, and return the results."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = np.array([derive_seed(key, number) for number in range(_ROUNDS)], dtype=np.uint64)
    values = _apply_feistel_network(indices.astype(np.uint64), half, keys)
    while (is_outside := values >= size).any():
        values[is_outside] = _apply_feistel_network(values[is_outside], half, keys)
    return values.astype(np.int64)


def _apply_feistel_network(values: npt.NDArray[np.uint64], half_bits: int, round_keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in round_keys:
        left, right = right, left ^ (_mix_bits(right ^ key) & mask)
    return (left << shift) | right


def _mix_bits(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `values` mixed by SplitMix64's finalizer (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
