"""`trainer.tensor_statistics_recorder_config`: statistics of weights, activations and gradients."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from swarmtrain.config.schema.section import Section


class TensorKind(StrEnum):
    """Tensors whose statistics can be recorded: weights, activations, and the gradients of either."""

    weights = "weights"
    activations = "activations"
    gradients = "gradients"
    activation_gradients = "activation_gradients"


class Statistic(StrEnum):
    """A statistic of a tensor over its finite values. Percentages are of all values."""

    l1 = "l1"
    mean = "mean"
    std = "std"
    skew = "skew"
    kurtosis = "kurtosis"
    norm = "norm"
    max = "max"
    min = "min"
    median = "median"
    abs_std = "abs_std"
    abs_max = "abs_max"
    abs_min = "abs_min"
    abs_median = "abs_median"
    pct_zero = "pct_zero"
    pct_underflow = "pct_underflow"
    pct_overflow = "pct_overflow"
    pct_underflow_e4m3 = "pct_underflow_e4m3"
    pct_underflow_e5m2 = "pct_underflow_e5m2"
    pct_posinf = "pct_posinf"
    pct_neginf = "pct_neginf"
    pct_nan = "pct_nan"
    non_finite = "non_finite"
    max_sparsity = "max_sparsity"
    norm_sparsity = "norm_sparsity"
    quantile_1 = "quantile_1"
    quantile_10 = "quantile_10"
    quantile_25 = "quantile_25"
    quantile_75 = "quantile_75"
    quantile_90 = "quantile_90"
    quantile_99 = "quantile_99"
    abs_quantile_1 = "abs_quantile_1"
    abs_quantile_10 = "abs_quantile_10"
    abs_quantile_25 = "abs_quantile_25"
    abs_quantile_75 = "abs_quantile_75"
    abs_quantile_90 = "abs_quantile_90"
    abs_quantile_99 = "abs_quantile_99"


_DEFAULT_STATISTICS = (
    Statistic.mean,
    Statistic.std,
    Statistic.l1,
    Statistic.abs_std,
    Statistic.max,
    Statistic.min,
    Statistic.abs_max,
    Statistic.abs_min,
    Statistic.norm,
    Statistic.pct_zero,
    Statistic.pct_underflow,
    Statistic.pct_overflow,
    Statistic.non_finite,
)


class TensorStatisticsRecorderConfig(Section):
    """Statistics of tensors, written to tensor-statistics.jsonl in log_dir, one line per recorded tensor."""

    interval: int = Field(100, ge=1, description="Steps between records.")
    statistics: tuple[tuple[str, tuple[Statistic, ...]], ...] = Field(
        (("*", _DEFAULT_STATISTICS),),
        description="Pairs of a glob of module names or full parameter names, and the statistics for it; the first match "
        "wins. pct_underflow and pct_overflow: fraction that the model's precision rounds to zero or "
        "infinity. Medians and quantiles are exact to 0.4 % and cost more than the others.",
    )
    kinds: tuple[TensorKind, ...] = Field(
        (TensorKind.weights, TensorKind.activations, TensorKind.gradients),
        description="Tensors to record: weights, activations (module outputs), gradients (of weights, before clipping), "
        "activation_gradients.",
    )
    include_module_type: bool = Field(False, description="Record the module's class next to its name.")
