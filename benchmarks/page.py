"""build/bench.json → docs/reference/speed.md, and the table that a person sees."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.records import Record

_ROW = re.compile(r"^\| `([^`]+)` \|.*\|$", re.MULTILINE)
_TEXT = re.compile(r"^- `([^`]+)`: .*$", re.MULTILINE)
_MACHINES = re.compile(r"^Measured on: (.+)\.$", re.MULTILINE)

_HEAD = """# Speed

Made by `make bench DOCS=1`, which runs every benchmark and writes this page. `make bench ONLY=help` runs one of them; there are
{names}.
Figures are medians; in brackets, the smallest and the largest. Ours and the other were measured in turns, so that both saw the
same machine. A ratio with brackets is the median of the pairs'; it lies within them with a chance of 95 %. A limit is the
most that ours may be: `make check` fails when a figure on this page is over it. A goal is the ratio that there should be.
What is not measured anew stays on the page.

Measured on: {machine}.

| benchmark | ours | the other | limit | ours / the other |
| --- | ---: | ---: | ---: | ---: |
"""


def page(records: Sequence[Record], names: Sequence[str], before: str = "") -> str:
    """Return the page of these records. `names` are those of all benchmarks; `before` is the page that stood, whose other rows stay."""
    cells = _kept(_ROW, before, names) | {record["name"]: f"| {' | '.join(_cells(record))} |" for record in records}
    texts = _kept(_TEXT, before, names) | {record["name"]: _about(record) for record in records}
    order = sorted(cells, key=lambda name: list(names).index(_benchmark(name)))
    stood = _MACHINES.findall(before)
    machines = "; ".join(dict.fromkeys([*(stood[0].split("; ") if stood else []), *(record["machine"] for record in records)]))
    head = _HEAD.format(names=", ".join(f"`{name}`" for name in names), machine=machines)
    return head + "".join(f"{cells[name]}\n" for name in order) + "\n" + "".join(f"{texts[name]}\n" for name in order)


def table(records: Sequence[Record]) -> str:
    """Return the records as a table for a terminal."""
    rows: list[tuple[str, ...]] = [("BENCHMARK", "OURS", "THE OTHER", "LIMIT", "RATIO", "")]
    rows += [(*(cell.strip("`") for cell in _cells(record)), _verdict(record)) for record in records]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def over(record: Record) -> bool:
    """Say whether the limit is not kept."""
    return record["limit"] is not None and record["ours"] is not None and bool(record["ours"] > record["limit"])


def _cells(record: Record) -> tuple[str, ...]:
    limit = "" if record["limit"] is None else f"{_number(record['limit'])} {record['unit']}"
    ratio = _ratio(record)
    return f"`{record['name']}`", _figure(record, "ours", "spread"), _figure(record, "other", "other_spread"), limit, ratio


def _figure(record: Record, value: str, spread: str) -> str:
    if record[value] is None:
        return ""
    low, high = record[spread]
    return f"{_number(record[value])} {record['unit']} ({_number(low)}–{_number(high)})"


def _ratio(record: Record) -> str:
    if record["ratio"] is None:
        return ""
    low_high, goal = record.get("interval"), record.get("goal")
    between = f" ({low_high[0]:.2f}–{low_high[1]:.2f})" if low_high else ""
    return f"{record['ratio']:.2f}{between}" + (f", goal {goal:g}" if goal else "")


def _kept(what: re.Pattern[str], before: str, names: Sequence[str]) -> dict[str, str]:
    return {found[1]: found[0] for found in what.finditer(before) if _benchmark(found[1]) in names}


def _benchmark(name: str) -> str:
    return name.partition("/")[0]


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _verdict(record: Record) -> str:
    short = bool(record.get("goal")) and record["ratio"] is not None and record["ratio"] < record["goal"]
    return record["why_not"] or ("OVER THE LIMIT" if over(record) else "SHORT OF THE GOAL" if short else "")


def _about(record: Record) -> str:
    text = f"- `{record['name']}`: {record['what']}"
    text += f", against {record['other_is']}" if record["other_is"] else ""
    text += f". Not measured here: {record['why_not']}" if record["why_not"] else ""
    return text + (f"; {record['note']}" if record["note"] else "") + "."
