"""Benchmark rows as records in build/bench.json: one list in the registry's order. The rows of one benchmark can be replaced."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine_description
from benchmarks.measurement import BenchmarkRow, compute_median_confidence_interval

Record = dict[str, Any]
"""A row: name, description, result and baseline (medians in `unit`, null if not measured) and their spreads, baseline_description,
ratio (the median of the pairs' ratios) and its interval, limit, goal …
"""


def build_record(row: BenchmarkRow, load_average: float) -> Record:
    """Return `row` as a record; `load_average`: load average of the machine at the start of the benchmark."""
    return {
        "name": row.name,
        "description": row.description,
        "unit": row.unit,
        **dict(_iterate_figures(row)),
        "baseline_description": row.baseline_description,
        "limit": row.limit and _round_result(row.limit),
        "goal": row.goal,
        "note": row.note,
        "skip_reason": row.skip_reason,
        "machine": machine_description.describe_machine(),
        "load": round(load_average, 1),
    }


def read_records(file: Path) -> list[Record]:
    """Return the records in `file`; empty if it does not exist."""
    records: list[Record] = json.loads(file.read_text()) if file.exists() else []
    return records


def write_records(file: Path, records: Sequence[Record]) -> None:
    """Write the records to `file`."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def merge_records(
    previous_records: Sequence[Record], benchmark_name: str, new_records: Sequence[Record], benchmark_names: Sequence[str]
) -> list[Record]:
    """Return `previous_records` with the records of `benchmark_name` replaced by `new_records`, in the order of `benchmark_names`.

    `benchmark_names`: names of all registered benchmarks; records of other benchmarks are dropped.
    """
    other_records = [
        found
        for found in previous_records
        if _get_benchmark_name(found) in benchmark_names and _get_benchmark_name(found) != benchmark_name
    ]
    return sorted([*other_records, *new_records], key=lambda found: list(benchmark_names).index(_get_benchmark_name(found)))


def _get_benchmark_name(benchmark_record: Record) -> str:
    return str(benchmark_record["name"]).partition("/")[0]


def _iterate_figures(row: BenchmarkRow) -> Iterator[tuple[str, object]]:
    for value, spread, sample in (("result", "spread", row.result), ("baseline", "baseline_spread", row.baseline)):
        yield value, _round_result(sample.median) if sample else None
        yield spread, [_round_result(edge) for edge in sample.spread] if sample else None
    ratios = (
        [result / baseline for result, baseline in zip(row.result.values, row.baseline.values, strict=True)]
        if row.result and row.baseline and all(row.baseline.values)
        else []
    )
    ratio_interval = compute_median_confidence_interval(ratios)
    yield "ratio", _round_result(statistics.median(ratios)) if ratios else None
    yield "interval", [_round_result(edge) for edge in ratio_interval] if ratio_interval else None


def _round_result(value: float) -> float:
    return round(value, 3)
