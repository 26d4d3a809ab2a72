"""Figures of a tensor that is there in parts: what each part adds up to, how two of these are put together, what follows from all.

Moments are kept about the mean and merged by the formulas of Chan et al. (1979) and Pébay (2008), since about zero those of
numbers that hardly differ, as norms' weights, would cancel out. Quantiles come from counts of values rounded to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config.tensor_statistics import Statistic

FINITE, MEAN, M2, M3, M4, ALL, ABS, ZEROS, UNDER, OVER, E4M3, E5M2, POSITIVE, NEGATIVE, NAN, MOST, LEAST, SMALLEST = range(18)
"""Columns. Those from MOST on are maxima, of the values, their opposites and those of their sizes; from ALL on sums."""
COLUMNS = 18
BINS = 1 << 16
_AT_ONCE = 1 << 22
"""Numbers that are looked at together: in fp64 they take eight times the memory of bytes."""
_E4M3, _E5M2 = 2.0**-10, 2.0**-17
"""What is no larger is rounded to zero: half of the smallest number."""
_ORDERED = {Statistic.median, Statistic.abs_median, Statistic.max_sparsity}


def ordered(wanted: Collection[Statistic]) -> bool:
    """Return whether any of `wanted` takes the counts of values."""
    return any(one in _ORDERED or "quantile" in one for one in wanted)


def nothing(device: torch.device | None = None) -> Tensor:
    """Return the columns of no numbers."""
    row = torch.zeros(COLUMNS, dtype=torch.float64, device=device)
    row[MOST:] = -math.inf
    return row


def of(tensor: Tensor, narrow: torch.dtype) -> Tensor:
    """Return the columns of `tensor`. `narrow`: what its numbers are rounded to where they are used."""
    row = nothing(tensor.device)
    for part in torch.split(tensor.detach().reshape(-1), _AT_ONCE):
        row = merged(row, _of(part, narrow)) if len(part) else row
    return row


def counts(tensor: Tensor) -> Tensor:
    """Return how often each bfloat16, by its bits, is the nearest to a finite number of `tensor`."""
    found = torch.zeros(BINS, dtype=torch.int64, device=tensor.device)
    for part in torch.split(tensor.detach().reshape(-1), _AT_ONCE):
        bits = part.to(torch.bfloat16).view(torch.int16).int() & (BINS - 1)
        found += torch.bincount(torch.where(part.isfinite(), bits, BINS), minlength=BINS + 1)[:BINS]
    return found


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Return the columns of two parts together, or, row by row, of several."""
    total = one + other
    total[..., MOST:] = torch.maximum(one[..., MOST:], other[..., MOST:])
    m, n = one[..., FINITE], other[..., FINITE]
    size = torch.clamp(m + n, min=1.0)
    apart = other[..., MEAN] - one[..., MEAN]
    total[..., MEAN] = (m * one[..., MEAN] + n * other[..., MEAN]) / size
    total[..., M2] += apart**2 * m * n / size
    total[..., M3] += apart**3 * m * n * (m - n) / size**2 + 3 * apart * (m * other[..., M2] - n * one[..., M2]) / size
    total[..., M4] += (
        apart**4 * m * n * (m**2 - m * n + n**2) / size**3
        + 6 * apart**2 * (m**2 * other[..., M2] + n**2 * one[..., M2]) / size**2
        + 4 * apart * (m * other[..., M3] - n * one[..., M3]) / size
    )
    return total


def figures(row: Tensor, wanted: Collection[Statistic], values: Tensor | None = None) -> dict[str, Any]:
    """Return the `wanted` figures of the columns `row`; `values` are the counts, if any of them takes these. None: there is none."""
    found = _plain(row.tolist()) | (_ordered(row, values) if values is not None else {})
    told = {str(one): found[one] for one in wanted}
    return {name: value if math.isfinite(value) else None for name, value in told.items()}


def _of(part: Tensor, narrow: torch.dtype) -> Tensor:
    finite, narrowed = part.isfinite(), part.to(narrow)
    wide = torch.where(finite, part, 0).double()
    size, number = wide.abs(), torch.clamp(finite.sum(), min=1)
    mean = wide.sum() / number
    central = torch.where(finite, wide - mean, 0)
    square, there = central.square(), part != 0
    columns = {
        FINITE: finite.sum(),
        MEAN: mean,
        M2: square.sum(),
        M3: (square * central).sum(),
        M4: square.square().sum(),
        ALL: torch.tensor(len(part), device=part.device),
        ABS: size.sum(),
        ZEROS: (~there).sum(),
        UNDER: (there & (narrowed == 0)).sum(),
        OVER: (finite & narrowed.isinf()).sum(),
        E4M3: (finite & there & (size <= _E4M3)).sum(),
        E5M2: (finite & there & (size <= _E5M2)).sum(),
        POSITIVE: part.isposinf().sum(),
        NEGATIVE: part.isneginf().sum(),
        NAN: part.isnan().sum(),
        MOST: torch.where(finite, wide, -math.inf).max(),
        LEAST: -torch.where(finite, wide, math.inf).min(),
        SMALLEST: -torch.where(finite, size, math.inf).min(),
    }
    return torch.stack([columns[number].double() for number in range(COLUMNS)])


def _plain(row: list[float]) -> dict[Statistic, float]:
    n, every = max(1.0, row[FINITE]), max(1.0, row[ALL])
    squares = row[M2] + n * row[MEAN] ** 2
    std, spread = math.sqrt(row[M2] / max(1.0, n - 1)), row[M2] / n
    norm = math.sqrt(squares)
    return {
        Statistic.l1: row[ABS] / n,
        Statistic.mean: row[MEAN],
        Statistic.std: std,
        Statistic.skew: row[M3] / n / std**3 if std else math.nan,
        Statistic.kurtosis: row[M4] / n / spread**2 - 3 if spread else math.nan,
        Statistic.norm: norm,
        Statistic.max: row[MOST],
        Statistic.min: -row[LEAST],
        Statistic.abs_std: math.sqrt(max(0.0, squares - row[ABS] ** 2 / n) / max(1.0, n - 1)),
        Statistic.abs_max: max(row[MOST], row[LEAST]),
        Statistic.abs_min: -row[SMALLEST],
        Statistic.pct_zero: row[ZEROS] / every,
        Statistic.pct_underflow: row[UNDER] / every,
        Statistic.pct_overflow: row[OVER] / every,
        Statistic.pct_underflow_e4m3: row[E4M3] / every,
        Statistic.pct_underflow_e5m2: row[E5M2] / every,
        Statistic.pct_posinf: row[POSITIVE] / every,
        Statistic.pct_neginf: row[NEGATIVE] / every,
        Statistic.pct_nan: row[NAN] / every,
        Statistic.non_finite: int(row[ALL] - row[FINITE]),
        Statistic.norm_sparsity: math.sqrt(n) * norm / row[ABS] if row[ABS] else math.nan,
    }


def _ordered(row: Tensor, values: Tensor) -> dict[Statistic, float]:
    bits, sizes = _scale()
    upright, folded = values[bits], (values + values.roll(BINS // 2))[sizes]
    found = {Statistic.median: _quantile(bits, upright, 0.5), Statistic.abs_median: _quantile(sizes, folded, 0.5)}
    for percent in (1, 10, 25, 75, 90, 99):
        found[Statistic(f"quantile_{percent}")] = _quantile(bits, upright, percent / 100)
        found[Statistic(f"abs_quantile_{percent}")] = _quantile(sizes, folded, percent / 100)
    middle, most = found[Statistic.abs_median], float(torch.maximum(row[MOST], row[LEAST]))
    found[Statistic.max_sparsity] = (most - middle) / middle if middle else math.nan
    return found


def _quantile(bits: Tensor, times: Tensor, share: float) -> float:
    """Return the number below which lies this `share` of those with these `bits`, which go up, each there so many `times`."""
    until = times.cumsum(0)
    if not int(until[-1]):
        return math.nan
    place = math.floor(share * (int(until[-1]) - 1))
    return float(_numbers(bits[torch.searchsorted(until, place, right=True)]))


def _numbers(bits: Tensor) -> Tensor:
    return torch.where(bits < BINS // 2, bits, bits - BINS).to(torch.int16).view(torch.bfloat16)


@cache
def _scale() -> tuple[Tensor, Tensor]:
    """Return the bits of every finite bfloat16 from the lowest to the highest, and of those without a sign."""
    bits = torch.arange(BINS)
    numbers = _numbers(bits).float()
    bits = bits[numbers.isfinite()]
    order = numbers[bits].argsort(stable=True)
    return bits[order], bits[bits < BINS // 2]
