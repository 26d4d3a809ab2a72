"""Normally distributed numbers that are a function of their place in a matrix.

A random number generator has to draw a matrix from its first element on, in one thread. Here each pair of neighbouring elements of a row is
computed from its place alone, so that a rank draws just its shard, on its device, and a CPU draws with all its cores. The bits of a value
depend neither on the shard nor on the device: only integers, table entries and one sum are computed, which are exact everywhere.

The word of a pair is output number `row × pairs per row + pair` of SplitMix64, a counter followed by a mixer (Steele, Lea, Flood 2014,
"Fast splittable pseudorandom number generators"). Each half of the word is one element: the sum of two entries of a table of 65,536
quantiles of the normal distribution (Thomas 2013, "Parallel generation of Gaussian random numbers using the table-Hadamard transform"). The
variance is 1, the kurtosis 2.9996, and no value is beyond 6.12 standard deviations.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIXING_STEPS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)
"""Right shift and multiplier of each step of SplitMix64's mixer (variant 13 of Stafford 2011)."""
_TABLE_BITS = 16
_TABLE_MASK = (1 << _TABLE_BITS) - 1
_CPU_BLOCK_PAIRS = 1 << 15
"""Pairs that one thread computes at a time: its intermediate results fit in a core's cache."""
_DEVICE_BLOCK_PAIRS = 1 << 23


def draw_normals(target: Tensor, standard_deviation: float, *, seed: int, columns: int, first_row: int = 0, first_column: int = 0) -> None:
    """Fill `target` (rows, columns) with a part of a matrix of normally distributed numbers with mean 0.

    `columns`: number of columns of the full matrix. `first_row`, `first_column`: where `target` begins in it. The numbers are computed in
    float32, and converted to the type of `target`. `seed`: the seed of the matrix, from 0 to 2^63 - 1.
    """
    target = target.detach()  # torch.no_grad() of the caller does not hold in other threads
    rows, width = target.shape
    if not target.numel():
        return
    first_pair, skipped = divmod(first_column, 2)
    pairs = (skipped + width + 1) // 2
    table = _build_quantile_table().to(target.device).mul(standard_deviation / 2**0.5)
    pair_numbers = torch.arange(first_pair, first_pair + pairs, device=target.device).mul_(_wrap_to_int64(_GOLDEN_GAMMA))
    pairs_per_row = (columns + 1) // 2

    def draw_block(start: int, stop: int) -> None:
        row_numbers = torch.arange(first_row + start, first_row + stop, device=target.device)
        first_words = row_numbers.mul_(_wrap_to_int64(pairs_per_row * _GOLDEN_GAMMA)).add_(_wrap_to_int64(seed + _GOLDEN_GAMMA))
        words = _mix_words(first_words[:, None] + pair_numbers).view(torch.int32).view(-1)
        values = table.index_select(0, words & _TABLE_MASK)
        values += table.index_select(0, words.bitwise_right_shift_(_TABLE_BITS).bitwise_and_(_TABLE_MASK))
        target[start:stop] = values.view(stop - start, 2 * pairs)[:, skipped : skipped + width]

    is_cpu = target.device.type == "cpu"
    block_rows = max(1, (_CPU_BLOCK_PAIRS if is_cpu else _DEVICE_BLOCK_PAIRS) // pairs)
    blocks = [(start, min(start + block_rows, rows)) for start in range(0, rows, block_rows)]
    if is_cpu and len(blocks) > 1 and torch.get_num_threads() > 1:
        with _start_worker_threads(min(torch.get_num_threads(), len(blocks))) as pool:
            list(pool.map(lambda block: draw_block(*block), blocks))
    else:
        for block in blocks:
            draw_block(*block)


def _mix_words(words: Tensor) -> Tensor:
    """Mix the 64-bit `words` in place, and return them: every bit depends on every bit before."""
    shifted = torch.empty_like(words)
    for shift, multiplier in _MIXING_STEPS:
        torch.bitwise_right_shift(words, shift, out=shifted)
        words.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))  # the mask makes it a logical shift
        if multiplier != 1:
            words.mul_(_wrap_to_int64(multiplier))
    return words


@cache
def _build_quantile_table() -> Tensor:
    """Return 65,536 quantiles of the standard normal distribution, each of the same probability, scaled to a variance of 1."""
    count = 1 << _TABLE_BITS
    inverse_cdf = NormalDist().inv_cdf
    quantiles = torch.tensor([inverse_cdf((index + 0.5) / count) for index in range(count)], dtype=torch.float64)
    return quantiles.div_(quantiles.square().mean().sqrt()).float()


@contextmanager
def _start_worker_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Context manager: a pool of `count` threads, in each of which torch uses one core."""
    # torch's lookup in a table uses a single core, so each thread draws blocks of its own. The number of threads that torch uses is set for
    # the calling thread and for new ones.
    cores = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(count, initializer=lambda: torch.set_num_threads(1)) as pool:
            yield pool
    finally:
        torch.set_num_threads(cores)


def _wrap_to_int64(word: int) -> int:
    """Return the signed integer with the lowest 64 bits of `word`."""
    return (word + (1 << 63)) % (1 << 64) - (1 << 63)
