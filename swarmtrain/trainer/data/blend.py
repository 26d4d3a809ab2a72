"""Blending of data sets: select the data set of each sample, so that the proportions up to any position are exact to within one sample.

Each data set has an integer weight: its number of samples per period. The period is the sum of the weights. Sample j of a set with weight c
is due between the positions j × period / c and (j + 1) × period / c. Each position is assigned to the sample with the earliest deadline
among the samples whose interval has begun (earliest deadline first). A valid schedule always exists, since the sets' rates sum to one
sample per position (Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate progress"). One period is stored as a table, in which any
position is looked up directly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from swarmtrain.config.schema.data import BlendedDatasetConfig
from swarmtrain.trainer.data.memory_map import Ids

MAX_PERIOD = 1 << 16
"""Approximate maximum period. Weights that only a longer period can represent exactly are rounded to multiples of 1 / MAX_PERIOD."""


def compute_dataset_weights(config: BlendedDatasetConfig, document_counts: Sequence[int]) -> list[Fraction]:
    """Return the relative weight of each data set. `document_counts`: number of documents in each set."""
    if config.weights is not None:
        return [Fraction(repr(weight)) for weight in config.weights]
    if config.weight_examples_proportional:
        return [_compute_dataset_weight(min(count, config.ep_maximum or count), 1 / config.ep_temperature) for count in document_counts]
    return [_compute_dataset_weight(count, config.weighted_sampler_alpha) for count in document_counts]


def compute_integer_weights(weights: Sequence[Fraction]) -> list[int]:
    """Return integer weights in proportion to `weights`, at least 1 each.

    The proportions are exact if the sum of the integer weights can be at most MAX_PERIOD; else they are rounded.
    """
    total = sum(weights)
    exact = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in exact))
    return [max(1, round(share * min(period, MAX_PERIOD))) for share in exact]


class Blend:
    """Infinite sequence of data set indices in which each set occurs in proportion to its weight."""

    def __init__(self, dataset_weights: Sequence[int]) -> None:
        """`dataset_weights`: for each data set, its number of samples per period (at least 1)."""
        self._dataset_weights = np.array(dataset_weights, dtype=np.int64)
        self._period_sets, self._earlier_counts = _build_interleaving_period(dataset_weights)

    def find_datasets_at(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return for each of `positions` the index of its data set, and the number of samples of this set at earlier positions."""
        rounds, within = np.divmod(positions, len(self._period_sets))
        sets = self._period_sets[within]
        return sets, rounds * self._dataset_weights[sets] + self._earlier_counts[within]


def _build_interleaving_period(dataset_weights: Sequence[int]) -> tuple[Ids, Ids]:
    """Return for each position of one period the index of its data set, and the number of earlier samples of this set in the period."""
    period = sum(dataset_weights)
    windows = [
        (turn * period // share, -(-(turn + 1) * period // share), number)
        for number, share in enumerate(dataset_weights)
        for turn in range(share)
    ]
    windows.sort(reverse=True)
    waiting: list[tuple[int, int]] = []
    sets, earlier_counts, counts_so_far = np.empty(period, dtype=np.int64), np.empty(period, dtype=np.int64), [0] * len(dataset_weights)
    for position in range(period):
        while windows and windows[-1][0] <= position:
            heapq.heappush(waiting, windows.pop()[1:])
        _, number = heapq.heappop(waiting)
        sets[position], earlier_counts[position] = number, counts_so_far[number]
        counts_so_far[number] += 1
    return sets, earlier_counts


def _compute_dataset_weight(document_count: int, exponent: float) -> Fraction:
    return Fraction(document_count) if exponent == 1 else Fraction(repr(float(document_count) ** exponent))
