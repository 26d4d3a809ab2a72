"""Which set each position takes its sample from, so that after n samples every set has had its share of n, give or take one.

Shares are whole numbers whose sum is a period. Sample j of a set with share c is due between the positions
j × period / c and (j + 1) × period / c; at each position goes, of those whose time has come, the one that is due first.
One always fits, as the shares add up to one a position (Baruah, Cohen, Plaxton and Varvel 1996, "Proportionate
progress"). One period is a table; any position is found in it at once.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from swarmtrain.config.data import BlendedDatasetConfig
from swarmtrain.trainer.data.memory_map import Ids

PERIOD = 1 << 16
"""The longest period, about: weights that no shorter one has exactly are rounded to parts of this."""


def weights(config: BlendedDatasetConfig, documents: Sequence[int]) -> list[Fraction]:
    """Return the weight of each set, given the documents each has. They are in proportion, and need not add up to one."""
    if config.weights is not None:
        return [Fraction(repr(weight)) for weight in config.weights]
    if config.weight_examples_proportional:
        return [_power(min(count, config.ep_maximum or count), 1 / config.ep_temperature) for count in documents]
    return [_power(count, config.weighted_sampler_alpha) for count in documents]


def shares(of: Sequence[Fraction]) -> list[int]:
    """Return weights as whole numbers: exact if their sum is then at most PERIOD, else in parts of it, rounded, none to nothing."""
    total = sum(of)
    exact = [weight / total for weight in of]
    period = math.lcm(*(share.denominator for share in exact))
    return [max(1, round(share * min(period, PERIOD))) for share in exact]


class Blend:
    """An endless sequence in which each set comes in proportion to its share."""

    def __init__(self, of: Sequence[int]) -> None:
        """`of` has the share of each set: positive whole numbers."""
        self._shares = np.array(of, dtype=np.int64)
        self._sets, self._turns = _period(of)

    def places(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return for each position the set that has it, and how many samples that set has had before."""
        rounds, within = np.divmod(positions, len(self._sets))
        sets = self._sets[within]
        return sets, rounds * self._shares[sets] + self._turns[within]


def _period(of: Sequence[int]) -> tuple[Ids, Ids]:
    """Return for each position of one period its set, and how many that set has had within the period before."""
    period = sum(of)
    times = [(turn * period // share, -(-(turn + 1) * period // share), number) for number, share in enumerate(of) for turn in range(share)]
    times.sort(reverse=True)
    waiting: list[tuple[int, int]] = []
    sets, turns, had = np.empty(period, dtype=np.int64), np.empty(period, dtype=np.int64), [0] * len(of)
    for position in range(period):
        while times and times[-1][0] <= position:
            heapq.heappush(waiting, times.pop()[1:])
        _, number = heapq.heappop(waiting)
        sets[position], turns[position] = number, had[number]
        had[number] += 1
    return sets, turns


def _power(count: int, exponent: float) -> Fraction:
    return Fraction(count) if exponent == 1 else Fraction(repr(float(count) ** exponent))
