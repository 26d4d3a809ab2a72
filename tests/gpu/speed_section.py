"""`python tests/gpu/speed_section.py ROWS [NOTE]`: write the results of `make gpu`, as JSON lines, to docs/reference/speed.md.

The section of a GPU is replaced if the page has one. NOTE is a sentence about how the rows were measured.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from stages import STAGES

_SPEED_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "speed.md"
_HIDDEN_VALUES = ("longest kernels",)
_SECTION_PATTERN = re.compile(r"^## .*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def main(argv: Sequence[str]) -> None:
    """Replace the section of the GPU on which the rows in the file `argv[0]` were measured."""
    rows = [json.loads(line) for line in Path(argv[0]).read_text().splitlines() if line.startswith("{")]
    _SPEED_PAGE.write_text(replace_section(_SPEED_PAGE.read_text(), render_section(rows, *argv[1:])))


def replace_section(page: str, section: str) -> str:
    """Return `page` with `section` in place of the section with the same title, or at its end."""
    title = section.partition("\n")[0]
    kept = [match[0].rstrip() for match in _SECTION_PATTERN.finditer(page) if match[0].partition("\n")[0] != title]
    start = page[: page.index("\n## ")] if "\n## " in page else page
    return "\n\n".join([start.rstrip(), *kept, section.rstrip()]) + "\n"


def render_section(records: Sequence[Mapping[str, Any]], note: str = "") -> str:
    """Return the Markdown section of one run of the table, with a table for each stage."""
    versions = next(record["values"] for record in records if record["name"] == "versions")
    title = f"{versions.get('gpu', 'CPU')}, torch {versions['torch'].partition('+')[0]}"
    machine = ", ".join(f"{name} {value}" for name, value in versions.items())
    lines = [f"## {title}", "", f"Measured by `make gpu`: {machine}. {note}".rstrip()]
    ordered = sorted(records, key=lambda record: list(STAGES).index(record["stage"]))
    for stage, group in groupby(ordered, key=lambda record: str(record["stage"])):
        lines += ["", f"{stage}: {STAGES[stage]}", "", "| check | result | values |", "| --- | --- | --- |"]
        lines += list(_render_rows(list(group)))
    return "\n".join(lines) + "\n"


def _render_rows(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        if record["name"] == "versions" or record["name"].startswith(_HIDDEN_VALUES):
            continue
        note = f"; {record['reason'].splitlines()[0]}" if record["reason"] else ""
        yield f"| {record['name']} | {record['outcome']}{note} | {' '.join(format_values(record['values']).split())} |"


def format_values(values: Mapping[str, Any]) -> str:
    """Return the values as text, with the unit that each name ends with."""
    return ", ".join(f"{name.replace('_', ' ')} {f'{value:.4g}' if isinstance(value, float) else value}" for name, value in values.items())


if __name__ == "__main__":
    main(sys.argv[1:])
