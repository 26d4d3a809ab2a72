"""Statistics of a sharded tensor: partial statistics are computed per shard, merged over shards, and converted to final statistics.

The partial statistics of a shard are a row of numbers, with the columns below. Moments are central moments, merged by the formulas of Chan
et al. (1979) and Pébay (2008): with raw moments, values that hardly differ, such as norm weights, would suffer from cancellation.
Quantiles are computed from a histogram of the values rounded to bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import cache
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config.schema.tensor_statistics import Statistic

(
    FINITE_COUNT,
    MEAN,
    M2,
    M3,
    M4,
    COUNT,
    ABS_SUM,
    ZEROS,
    UNDERFLOWS,
    OVERFLOWS,
    UNDERFLOWS_E4M3,
    UNDERFLOWS_E5M2,
    POSITIVE_INFS,
    NEGATIVE_INFS,
    NANS,
    MAX,
    NEGATED_MIN,
    NEGATED_ABS_MIN,
) = range(18)
"""Indices of the columns of partial statistics.

Columns from COUNT to NANS are sums. Columns from MAX on are maxima: of the values, of the negated values, and of the negated magnitudes.
"""
COLUMN_COUNT = 18
BIN_COUNT = 1 << 16
_CHUNK_SIZE = 1 << 22
"""Number of values that are processed at a time. Each takes 8 bytes, since they are converted to float64."""
_E4M3_UNDERFLOW_LIMIT, _E5M2_UNDERFLOW_LIMIT = 2.0**-10, 2.0**-17
"""Largest magnitudes that round to zero in e4m3 and e5m2: half of the smallest subnormal."""
_QUANTILE_STATISTICS = {Statistic.median, Statistic.abs_median, Statistic.max_sparsity}


def needs_histogram(statistics: Collection[Statistic]) -> bool:
    """Return whether any of `statistics` needs the histogram."""
    return any(statistic in _QUANTILE_STATISTICS or "quantile" in statistic for statistic in statistics)


def create_empty_partial_statistics(device: torch.device | None = None) -> Tensor:
    """Return the partial statistics of a tensor without values."""
    row = torch.zeros(COLUMN_COUNT, dtype=torch.float64, device=device)
    row[MAX:] = -math.inf
    return row


def compute_partial_statistics(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the partial statistics of `tensor` in float64: a row with COLUMN_COUNT columns.

    `dtype`: dtype to which the values are rounded when the model uses them.
    """
    row = create_empty_partial_statistics(tensor.device)
    for chunk in torch.split(tensor.detach().reshape(-1), _CHUNK_SIZE):
        row = merge_partial_statistics(row, _compute_chunk_statistics(chunk, dtype)) if len(chunk) else row
    return row


def compute_histogram(tensor: Tensor) -> Tensor:
    """Return a histogram (BIN_COUNT): for each bfloat16 bit pattern, the number of finite values of `tensor` that round to it."""
    histogram = torch.zeros(BIN_COUNT, dtype=torch.int64, device=tensor.device)
    for chunk in torch.split(tensor.detach().reshape(-1), _CHUNK_SIZE):
        bits = chunk.to(torch.bfloat16).view(torch.int16).int() & (BIN_COUNT - 1)
        histogram += torch.bincount(torch.where(chunk.isfinite(), bits, BIN_COUNT), minlength=BIN_COUNT + 1)[:BIN_COUNT]
    return histogram


def merge_partial_statistics(first: Tensor, second: Tensor) -> Tensor:
    """Merge the partial statistics of two shards; if the inputs have several rows, merge them row by row."""
    total = first + second
    total[..., MAX:] = torch.maximum(first[..., MAX:], second[..., MAX:])
    m, n = first[..., FINITE_COUNT], second[..., FINITE_COUNT]
    count = torch.clamp(m + n, min=1.0)
    delta = second[..., MEAN] - first[..., MEAN]
    total[..., MEAN] = (m * first[..., MEAN] + n * second[..., MEAN]) / count
    total[..., M2] += delta**2 * m * n / count
    total[..., M3] += delta**3 * m * n * (m - n) / count**2 + 3 * delta * (m * second[..., M2] - n * first[..., M2]) / count
    total[..., M4] += (
        delta**4 * m * n * (m**2 - m * n + n**2) / count**3
        + 6 * delta**2 * (m**2 * second[..., M2] + n**2 * first[..., M2]) / count**2
        + 4 * delta * (m * second[..., M3] - n * first[..., M3]) / count
    )
    return total


def compute_statistics(partial_statistics: Tensor, statistics: Collection[Statistic], histogram: Tensor | None = None) -> dict[str, Any]:
    """Return the values of `statistics`, by name, computed from `partial_statistics`.

    `histogram` is required if any of `statistics` needs it. A statistic that is undefined for these values is None.
    """
    available = _compute_moment_statistics(partial_statistics.tolist()) | (
        _compute_quantile_statistics(partial_statistics, histogram) if histogram is not None else {}
    )
    selected = {str(statistic): available[statistic] for statistic in statistics}
    return {name: value if math.isfinite(value) else None for name, value in selected.items()}


def _compute_chunk_statistics(chunk: Tensor, dtype: torch.dtype) -> Tensor:
    finite, cast = chunk.isfinite(), chunk.to(dtype)
    float64_values = torch.where(finite, chunk, 0).double()
    magnitude, number = float64_values.abs(), torch.clamp(finite.sum(), min=1)
    mean = float64_values.sum() / number
    central = torch.where(finite, float64_values - mean, 0)
    square, nonzero = central.square(), chunk != 0
    columns = {
        FINITE_COUNT: finite.sum(),
        MEAN: mean,
        M2: square.sum(),
        M3: (square * central).sum(),
        M4: square.square().sum(),
        COUNT: torch.tensor(len(chunk), device=chunk.device),
        ABS_SUM: magnitude.sum(),
        ZEROS: (~nonzero).sum(),
        UNDERFLOWS: (nonzero & (cast == 0)).sum(),
        OVERFLOWS: (finite & cast.isinf()).sum(),
        UNDERFLOWS_E4M3: (finite & nonzero & (magnitude <= _E4M3_UNDERFLOW_LIMIT)).sum(),
        UNDERFLOWS_E5M2: (finite & nonzero & (magnitude <= _E5M2_UNDERFLOW_LIMIT)).sum(),
        POSITIVE_INFS: chunk.isposinf().sum(),
        NEGATIVE_INFS: chunk.isneginf().sum(),
        NANS: chunk.isnan().sum(),
        MAX: torch.where(finite, float64_values, -math.inf).max(),
        NEGATED_MIN: -torch.where(finite, float64_values, math.inf).min(),
        NEGATED_ABS_MIN: -torch.where(finite, magnitude, math.inf).min(),
    }
    return torch.stack([columns[number].double() for number in range(COLUMN_COUNT)])


def _compute_moment_statistics(partial_statistics: list[float]) -> dict[Statistic, float]:
    n, count = max(1.0, partial_statistics[FINITE_COUNT]), max(1.0, partial_statistics[COUNT])
    squares = partial_statistics[M2] + n * partial_statistics[MEAN] ** 2
    std, variance = math.sqrt(partial_statistics[M2] / max(1.0, n - 1)), partial_statistics[M2] / n
    norm = math.sqrt(squares)
    return {
        Statistic.l1: partial_statistics[ABS_SUM] / n,
        Statistic.mean: partial_statistics[MEAN],
        Statistic.std: std,
        Statistic.skew: partial_statistics[M3] / n / std**3 if std else math.nan,
        Statistic.kurtosis: partial_statistics[M4] / n / variance**2 - 3 if variance else math.nan,
        Statistic.norm: norm,
        Statistic.max: partial_statistics[MAX],
        Statistic.min: -partial_statistics[NEGATED_MIN],
        Statistic.abs_std: math.sqrt(max(0.0, squares - partial_statistics[ABS_SUM] ** 2 / n) / max(1.0, n - 1)),
        Statistic.abs_max: max(partial_statistics[MAX], partial_statistics[NEGATED_MIN]),
        Statistic.abs_min: -partial_statistics[NEGATED_ABS_MIN],
        Statistic.pct_zero: partial_statistics[ZEROS] / count,
        Statistic.pct_underflow: partial_statistics[UNDERFLOWS] / count,
        Statistic.pct_overflow: partial_statistics[OVERFLOWS] / count,
        Statistic.pct_underflow_e4m3: partial_statistics[UNDERFLOWS_E4M3] / count,
        Statistic.pct_underflow_e5m2: partial_statistics[UNDERFLOWS_E5M2] / count,
        Statistic.pct_posinf: partial_statistics[POSITIVE_INFS] / count,
        Statistic.pct_neginf: partial_statistics[NEGATIVE_INFS] / count,
        Statistic.pct_nan: partial_statistics[NANS] / count,
        Statistic.non_finite: int(partial_statistics[COUNT] - partial_statistics[FINITE_COUNT]),
        Statistic.norm_sparsity: math.sqrt(n) * norm / partial_statistics[ABS_SUM] if partial_statistics[ABS_SUM] else math.nan,
    }


def _compute_quantile_statistics(partial_statistics: Tensor, histogram: Tensor) -> dict[Statistic, float]:
    sorted_bits, sorted_abs_bits = _sort_bfloat16_bits()
    counts_by_value, counts_by_magnitude = histogram[sorted_bits], (histogram + histogram.roll(BIN_COUNT // 2))[sorted_abs_bits]
    statistics = {
        Statistic.median: _compute_quantile(sorted_bits, counts_by_value, 0.5),
        Statistic.abs_median: _compute_quantile(sorted_abs_bits, counts_by_magnitude, 0.5),
    }
    for percent in (1, 10, 25, 75, 90, 99):
        statistics[Statistic(f"quantile_{percent}")] = _compute_quantile(sorted_bits, counts_by_value, percent / 100)
        statistics[Statistic(f"abs_quantile_{percent}")] = _compute_quantile(sorted_abs_bits, counts_by_magnitude, percent / 100)
    abs_median, abs_max = statistics[Statistic.abs_median], float(torch.maximum(partial_statistics[MAX], partial_statistics[NEGATED_MIN]))
    statistics[Statistic.max_sparsity] = (abs_max - abs_median) / abs_median if abs_median else math.nan
    return statistics


def _compute_quantile(sorted_bits: Tensor, bin_counts: Tensor, fraction: float) -> float:
    """Return the quantile at `fraction`.

    `sorted_bits`: bfloat16 bit patterns in ascending order of their values; `bin_counts`: number of values with each bit pattern.
    """
    cumulative_counts = bin_counts.cumsum(0)
    if not int(cumulative_counts[-1]):
        return math.nan
    position = math.floor(fraction * (int(cumulative_counts[-1]) - 1))
    return float(_decode_bfloat16(sorted_bits[torch.searchsorted(cumulative_counts, position, right=True)]))


def _decode_bfloat16(bits: Tensor) -> Tensor:
    return torch.where(bits < BIN_COUNT // 2, bits, bits - BIN_COUNT).to(torch.int16).view(torch.bfloat16)


@cache
def _sort_bfloat16_bits() -> tuple[Tensor, Tensor]:
    """Return the bit patterns of all finite bfloat16 values, and of the non-negative finite values, both in ascending order of value."""
    bits = torch.arange(BIN_COUNT)
    numbers = _decode_bfloat16(bits).float()
    bits = bits[numbers.isfinite()]
    order = numbers[bits].argsort(stable=True)
    return bits[order], bits[bits < BIN_COUNT // 2]
