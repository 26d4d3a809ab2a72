"""Render the records in build/bench.json as docs/reference/speed.md, and as a table for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

from benchmarks.records import Record

_ROW_PATTERN = re.compile(r"^\| `([^`]+)` \|.*\|$", re.MULTILINE)
_TEXT_PATTERN = re.compile(r"^- `([^`]+)`: .*$", re.MULTILINE)
_MACHINES_PATTERN = re.compile(r"^Measured on: (.+)\.$", re.MULTILINE)

_HEADER = """# Speed

`make bench DOCS=1` runs every benchmark and generates this page. `make bench ONLY=help` runs only the benchmark `help`. The
benchmarks are
{names}.
Each value is a median; the parentheses contain the smallest and the largest measurement. swarmtrain and the other tool are
measured in turns, so that both are measured under the same load of the machine. A ratio with parentheses is the median of the
ratios of pairs of measurements, with its 95 % confidence interval. A limit is the highest value that is allowed for swarmtrain:
`make check` fails if a value on this page exceeds its limit. A goal is the ratio that swarmtrain should reach. A result that is
not measured again stays on the page.

Measured on: {machine}.

| benchmark | swarmtrain | other tool | limit | swarmtrain / other tool |
| --- | ---: | ---: | ---: | ---: |
"""


def render_page(records: Sequence[Record], benchmark_names: Sequence[str], previous_page: str = "") -> str:
    """Return the Markdown page of `records`, in the order of `benchmark_names`.

    The rows that `previous_page` has of other benchmarks, and of those that cannot run here, are kept, and so are the sections of GPUs.
    """
    kept = set(benchmark_names) - {_get_benchmark_name(record["name"]) for record in records if not record["skip_reason"]}
    cells = _collect_previous_lines(_ROW_PATTERN, previous_page, kept) | {
        record["name"]: f"| {' | '.join(_format_cells(record))} |" for record in records
    }
    texts = _collect_previous_lines(_TEXT_PATTERN, previous_page, kept) | {
        record["name"]: _format_description(record) for record in records
    }
    order = sorted(cells, key=lambda name: list(benchmark_names).index(_get_benchmark_name(name)))
    previous_machines = _MACHINES_PATTERN.findall(previous_page)
    machines = "; ".join(
        dict.fromkeys([*(previous_machines[0].split("; ") if previous_machines else []), *(record["machine"] for record in records)])
    )
    header = _HEADER.format(names=", ".join(f"`{name}`" for name in benchmark_names), machine=machines)
    gpu_sections = previous_page[previous_page.index("\n## ") :] if "\n## " in previous_page else ""  # see tests/gpu/speed_section.py
    return header + "".join(f"{cells[name]}\n" for name in order) + "\n" + "".join(f"{texts[name]}\n" for name in order) + gpu_sections


def render_table(records: Sequence[Record]) -> str:
    """Return `records` as a table for the terminal."""
    rows: list[tuple[str, ...]] = [("BENCHMARK", "SWARMTRAIN", "OTHER TOOL", "LIMIT", "RATIO", "")]
    rows += [(*(cell.strip("`") for cell in _format_cells(record)), _format_check_result(record)) for record in records]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def is_over_limit(record: Record) -> bool:
    """Return whether the result of `record` exceeds its limit."""
    return record["limit"] is not None and record["result"] is not None and bool(record["result"] > record["limit"])


def _format_cells(record: Record) -> tuple[str, ...]:
    limit = "" if record["limit"] is None else f"{_format_number(record['limit'])} {record['unit']}"
    ratio = _format_ratio(record)
    return (
        f"`{record['name']}`",
        _format_sample(record, "result", "spread"),
        _format_sample(record, "baseline", "baseline_spread"),
        limit,
        ratio,
    )


def _format_sample(record: Record, value_key: str, spread_key: str) -> str:
    if record[value_key] is None:
        return ""
    low, high = record[spread_key]
    return f"{_format_number(record[value_key])} {record['unit']} ({_format_number(low)}–{_format_number(high)})"


def _format_ratio(record: Record) -> str:
    if record["ratio"] is None:
        return ""
    interval, goal = record.get("interval"), record.get("goal")
    interval_text = f" ({interval[0]:.2f}–{interval[1]:.2f})" if interval else ""
    return f"{record['ratio']:.2f}{interval_text}" + (f", goal {goal:g}" if goal else "")


def _collect_previous_lines(pattern: re.Pattern[str], previous_page: str, benchmark_names: Set[str]) -> dict[str, str]:
    return {match[1]: match[0] for match in pattern.finditer(previous_page) if _get_benchmark_name(match[1]) in benchmark_names}


def _get_benchmark_name(record_name: str) -> str:
    return record_name.partition("/")[0]


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _format_check_result(record: Record) -> str:
    is_short_of_goal = bool(record.get("goal")) and record["ratio"] is not None and record["ratio"] < record["goal"]
    return record["skip_reason"] or ("OVER THE LIMIT" if is_over_limit(record) else "SHORT OF THE GOAL" if is_short_of_goal else "")


def _format_description(record: Record) -> str:
    text = f"- `{record['name']}`: {record['description']}"
    text += f", against {record['baseline_description']}" if record["baseline_description"] else ""
    text += f". Not measured here: {record['skip_reason']}" if record["skip_reason"] else ""
    return text + (f"; {record['note']}" if record["note"] else "") + "."
