"""Metrics that a custom script logs, and their reduction over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from torch import Tensor

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.audit_log import replace_non_finite

MetricValues = dict[str, "MetricValue"]
"""Metrics that one rank logs in one step, by name."""


class ReductionOp(StrEnum):
    """Operation that reduces a metric over all ranks that logged it, in rank order."""

    mean = "mean"
    sum = "sum"
    min = "min"
    max = "max"
    last = "last"
    cat = "cat"


@dataclass(frozen=True)
class MetricValue:
    """The value of a metric on this rank, and its reduction over all ranks."""

    value: Any
    reduction: ReductionOp = ReductionOp.mean


def flatten_metric_results(name: str, value: Any) -> Iterator[tuple[str, MetricValue]]:
    """Yield the name and value of each metric in `value`. A mapping or a torchmetrics object with several results yields several metrics.

    Does not synchronize with the device. A tensor is cloned on its device, since the script may modify it afterwards. The `compute`
    method of a torchmetrics object is called by all ranks together. Raises TrainingError if a value is not a number.
    """
    reduction = value.reduction if isinstance(value, MetricValue) else ReductionOp.mean
    raw_value = value.value if isinstance(value, MetricValue) else value
    if callable(compute := getattr(raw_value, "compute", None)):
        raw_value = compute()
    if isinstance(raw_value, Mapping):
        for key, item in raw_value.items():
            yield from flatten_metric_results(f"{name}.{key}", MetricValue(item, reduction))
        return
    if isinstance(raw_value, Tensor):
        raw_value = raw_value.detach().clone()
        if reduction is not ReductionOp.cat and raw_value.numel() != 1:
            raise _build_metric_error(
                name, f"has {raw_value.numel()} elements", "reduce it to one value first, or log all elements with run.cat(...)"
            )
    elif reduction is ReductionOp.cat:
        raw_value = [_convert_metric_to_number(name, each) for each in (raw_value if isinstance(raw_value, Sequence) else [raw_value])]
    else:
        raw_value = _convert_metric_to_number(name, raw_value)
    yield name, MetricValue(raw_value, reduction)


def encode_metrics(values: Mapping[str, MetricValue]) -> dict[str, tuple[Any, str]]:
    """Return `values` as Python numbers and the names of their reductions, which collectives can send.

    Synchronizes with the device if a value is a tensor.
    """
    return {name: (_copy_to_host(metric), str(metric.reduction)) for name, metric in values.items()}


def decode_metrics(encoded: Mapping[str, tuple[Any, str]]) -> MetricValues:
    """Return the metrics that `encode_metrics` has encoded."""
    return {name: MetricValue(value, ReductionOp(reduction)) for name, (value, reduction) in encoded.items()}


def reduce_metrics(metrics_by_rank: Sequence[Mapping[str, MetricValue]]) -> dict[str, Any]:
    """Reduce the metrics of all ranks to one value per metric, and return these values by name. NaN/Inf becomes None."""
    values_by_name: dict[str, list[MetricValue]] = {}
    for rank_metrics in metrics_by_rank:
        for name, value in rank_metrics.items():
            values_by_name.setdefault(name, []).append(value)
    return {
        name: _replace_non_finite(_REDUCERS[rank_values[0].reduction]([rank_value.value for rank_value in rank_values]))
        for name, rank_values in values_by_name.items()
    }


_REDUCERS: dict[ReductionOp, Callable[[list[Any]], Any]] = {
    ReductionOp.mean: lambda values: sum(values) / len(values),
    ReductionOp.sum: sum,
    ReductionOp.min: lambda values: _reduce_comparable(min, values),
    ReductionOp.max: lambda values: _reduce_comparable(max, values),
    ReductionOp.last: lambda values: values[-1],
    ReductionOp.cat: lambda values: [number for part in values for number in part],
}


def _reduce_comparable(reduce: Callable[[list[Any]], Any], values: list[Any]) -> Any:
    """Return the minimum or maximum of `values`; NaN if any is NaN, as in torch. Python's result would depend on the order."""
    return math.nan if any(isinstance(value, float) and math.isnan(value) for value in values) else reduce(values)


def _copy_to_host(metric: MetricValue) -> Any:
    if not isinstance(metric.value, Tensor):
        return metric.value
    return metric.value.flatten().tolist() if metric.reduction is ReductionOp.cat else metric.value.item()


def _convert_metric_to_number(name: str, value: Any) -> int | float:
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise _build_metric_error(
            name, f"is not a number but {type(value).__name__}", "use a number, a tensor with one element, or a torchmetrics object"
        ) from None


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_replace_non_finite(each) for each in value]
    return replace_non_finite(value) if isinstance(value, float) else value


def _build_metric_error(name: str, message: str, hint: str) -> TrainingError:
    return TrainingError(f"{name} {message}", place="run.log", hint=hint)
