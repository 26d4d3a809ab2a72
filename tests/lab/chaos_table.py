"""The table of the cost of each fault: a row per fault, a column per way to keep the state. It is part of a Markdown text.

Rows that are not run again keep their cells.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from faults import DISKS, FAULTS, STATES

COLUMNS = [(state, disk) for state in STATES for disk in DISKS]
_HEADER_START = "| fault |"
_HEADER = [
    f"{_HEADER_START} {' | '.join(f'{state}, {disk} disk' for state, disk in COLUMNS)} |",
    f"| --- |{' ---: |' * len(COLUMNS)}",
]
Cells = dict[tuple[str, str], str]


def format_cell(lost_steps: int, pause_seconds: float) -> str:
    """Return the cell of a run that recomputed `lost_steps` steps and completed no step for `pause_seconds`."""
    return f"{lost_steps}, {pause_seconds:.0f} s"


def read_table(text: str) -> dict[str, Cells]:
    """Return the cells of the table in `text` by fault, state and disk; an empty mapping if there is no table."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(_HEADER_START)), len(lines))
    found = {}
    for line in lines[start + len(_HEADER) :]:
        if not line.startswith("|"):
            break
        name, *cells = [word.strip() for word in line.strip("|").split("|")]
        found[name] = {column: word for column, word in zip(COLUMNS, cells, strict=True) if word}
    return found


def update_table(text: str, new_cells: Mapping[str, Cells]) -> str:
    """Return `text` with `new_cells` merged into its table. If there is no table, it is appended."""
    old_cells = read_table(text)
    cells = {fault.name: old_cells.get(fault.name, {}) | new_cells.get(fault.name, {}) for fault in FAULTS}
    table = [*_HEADER, *(_format_row(name, cells[name]) for name in cells if cells[name])]
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(_HEADER_START)), len(lines))
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
    return "\n".join([*lines[:start], *table, *lines[end:], ""])


def _format_row(name: str, cells: Cells) -> str:
    return f"| {name} | {' | '.join(cells.get(column, '') for column in COLUMNS)} |"


def find_violations(cells: Mapping[str, Cells]) -> Iterator[str]:
    """Yield each fault without a cell, and each cell with more lost steps than the fault allows."""
    for fault in FAULTS:
        found = cells.get(fault.name, {})
        if not found:
            yield f"{fault.name}: is missing"
        for (state, disk), text in found.items():
            if int(text.partition(",")[0]) > fault.get_max_lost_steps(state):
                yield f"{fault.name}, {state}, {disk}: {text}"
