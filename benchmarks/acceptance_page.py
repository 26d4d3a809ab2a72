"""`python -m benchmarks.acceptance_page ROWS [NOTE]`: write the results of `make gpu`, as JSON lines, to docs/reference/speed.md.

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

from benchmarks.measurement import ROOT
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.stages import STAGES

_SPEED_PAGE = ROOT / "docs" / "reference" / "speed.md"
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
    """Return the Markdown section of one acceptance run, with a table for each stage."""
    versions = next(record["values"] for record in records if record["name"] == "versions")
    title = f"{versions.get('gpu', 'CPU')}, torch {versions['torch'].partition('+')[0]}"
    machine = ", ".join(f"{name} {value}" for name, value in versions.items())
    lines = [f"## {title}", "", f"Measured by `make gpu`: {machine}. {note}".rstrip()]
    descriptions = {stage.name: stage.description for stage in STAGES}
    ordered = sorted(records, key=lambda record: list(descriptions).index(record["stage"]))
    for stage, group in groupby(ordered, key=lambda record: str(record["stage"])):
        lines += ["", f"{stage}: {descriptions[stage]}", "", "| check | result | values |", "| --- | --- | --- |"]
        lines += list(_render_rows(list(group)))
    return "\n".join(lines) + "\n"


def _render_rows(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        if record["name"] == "versions" or record["name"].startswith(_HIDDEN_VALUES):
            continue
        row = Row(record["name"], Outcome(record["outcome"]), record["values"], record["reason"])
        note = f"; {row.reason.splitlines()[0]}" if row.reason else ""
        yield f"| {row.name} | {row.outcome}{note} | {' '.join(row.format_values().split())} |"


if __name__ == "__main__":
    main(sys.argv[1:])
