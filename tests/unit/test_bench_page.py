"""docs/reference/speed.md has every benchmark, and no figure exceeds its limit. `make bench DOCS=1` measures and writes the page."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.registry import BENCHMARKS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "speed.md"
NAMES = [benchmark.name for benchmark in BENCHMARKS]
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|\n").split("|")]


def parse_rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the page's table, by the benchmark's name."""
    return {found[0].strip("`"): found[1:] for line in text.splitlines() if line.startswith("| `") and (found := split_cells(line))}


def test_every_benchmark_is_on_the_page() -> None:
    there = parse_rows(PAGE.read_text())
    assert [name for name in NAMES if not any(row == name or row.startswith(f"{name}/") for row in there)] == []
    assert [name for name in there if name.partition("/")[0] not in NAMES] == []


def test_every_limit_on_the_page_is_kept() -> None:
    limits = {name: (ours, limit) for name, (ours, _, limit, _) in parse_rows(PAGE.read_text()).items() if limit}
    assert len(limits) >= 6
    figures = {name: [float(found[0]) if (found := _NUMBER.findall(cell)) else None for cell in pair] for name, pair in limits.items()}
    assert {name: pair for name, pair in figures.items() if pair[0] is None or pair[0] > pair[1]} == {}
