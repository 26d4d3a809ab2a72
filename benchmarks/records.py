"""Rows as build/bench.json holds them: one list, in the registry's order, of which one benchmark's part can be measured anew."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.measure import Row, interval

Record = dict[str, Any]
"""A row: name, what, ours and other (medians in `unit`, null if not measured) and their spreads, other_is, ratio (the median
of the pairs') and its interval, limit, goal …"""


def record(row: Row, load: float) -> Record:
    """Return `row` as it is written down; `load` is the machine's as its benchmark began."""
    return {
        "name": row.name,
        "what": row.what,
        "unit": row.unit,
        **dict(_figures(row)),
        "other_is": row.other_is,
        "limit": row.limit and _rounded(row.limit),
        "goal": row.goal,
        "note": row.note,
        "why_not": row.why_not,
        "machine": machine.describe(),
        "load": round(load, 1),
    }


def read(file: Path) -> list[Record]:
    """Return what `file` holds; nothing if it is not there."""
    found: list[Record] = json.loads(file.read_text()) if file.exists() else []
    return found


def write(file: Path, records: Sequence[Record]) -> None:
    """Write the records to `file`."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")


def merged(kept: Sequence[Record], benchmark: str, records: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """Return `kept` with `records` for what it had of `benchmark`, in the order of `names`, which are all benchmarks that there are."""
    others = [found for found in kept if _benchmark(found) in names and _benchmark(found) != benchmark]
    return sorted([*others, *records], key=lambda found: list(names).index(_benchmark(found)))


def _benchmark(found: Record) -> str:
    return str(found["name"]).partition("/")[0]


def _figures(row: Row) -> Iterator[tuple[str, object]]:
    for value, spread, sample in (("ours", "spread", row.ours), ("other", "other_spread", row.other)):
        yield value, _rounded(sample.median) if sample else None
        yield spread, [_rounded(edge) for edge in sample.spread] if sample else None
    ratios = [ours / other for ours, other in zip(row.ours.values, row.other.values, strict=True)] if row.ours and row.other else []
    between = interval(ratios)
    yield "ratio", _rounded(statistics.median(ratios)) if ratios else None
    yield "interval", [_rounded(edge) for edge in between] if between else None


def _rounded(value: float) -> float:
    return round(value, 3)
