"""build/bench.json → docs/reference/speed.md, and the table that a person sees."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.records import Record

_HEAD = """# Speed

Made by `make bench DOCS=1`, which runs every benchmark and writes this page. `make bench ONLY=help` runs one of them; there are
{names}.
Figures are medians; in brackets, the smallest and the largest. Ours and the other were measured in turns, so that both saw the
same machine. A limit is the most that ours may be: `make check` fails when a figure on this page is over it.

Measured on: {machine}.

| benchmark | ours | the other | limit | ours / the other |
| --- | ---: | ---: | ---: | ---: |
"""


def page(records: Sequence[Record], names: Sequence[str]) -> str:
    """Return the page of these records. `names` are those of all benchmarks."""
    machines = "; ".join(dict.fromkeys(record["machine"] for record in records))
    head = _HEAD.format(names=", ".join(f"`{name}`" for name in names), machine=machines)
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in map(_cells, records))
    return head + rows + "\n" + "".join(_about(record) for record in records)


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
    ratio = "" if record["ratio"] is None else f"{record['ratio']:.2f}"
    limit = "" if record["limit"] is None else f"{_number(record['limit'])} {record['unit']}"
    return f"`{record['name']}`", _figure(record, "ours", "spread"), _figure(record, "other", "other_spread"), limit, ratio


def _figure(record: Record, value: str, spread: str) -> str:
    if record[value] is None:
        return ""
    low, high = record[spread]
    return f"{_number(record[value])} {record['unit']} ({_number(low)}–{_number(high)})"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _verdict(record: Record) -> str:
    return record["why_not"] or ("OVER THE LIMIT" if over(record) else "")


def _about(record: Record) -> str:
    text = f"- `{record['name']}`: {record['what']}"
    text += f", against {record['other_is']}" if record["other_is"] else ""
    text += f". Not measured here: {record['why_not']}" if record["why_not"] else ""
    return text + (f"; {record['note']}" if record["note"] else "") + ".\n"
