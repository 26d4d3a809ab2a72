"""The table of what each fault cost, a row for each and a column for each way to keep the state; in a text that may hold more.

What is not run anew stays in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from faults import DISKS, FAULTS, STATES

COLUMNS = [(state, disk) for state in STATES for disk in DISKS]
_TITLE = "| fault |"
_HEAD = [
    f"{_TITLE} {' | '.join(f'{state}, {disk} disk' for state, disk in COLUMNS)} |",
    f"| --- |{' ---: |' * len(COLUMNS)}",
]
Cells = dict[tuple[str, str], str]


def cell(lost: int, pause: float) -> str:
    """Return what the table says of a run that made `lost` steps again, and none for `pause` seconds."""
    return f"{lost}, {pause:.0f} s"


def read(text: str) -> dict[str, Cells]:
    """Return the cells of the table in `text` by fault, state and disk; none if there is no table."""
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(_TITLE)), len(lines))
    found = {}
    for line in lines[start + len(_HEAD) :]:
        if not line.startswith("|"):
            break
        name, *cells = [word.strip() for word in line.strip("|").split("|")]
        found[name] = {column: word for column, word in zip(COLUMNS, cells, strict=True) if word}
    return found


def write(text: str, anew: Mapping[str, Cells]) -> str:
    """Return `text` with what was run `anew` in its table, which is put at the end where there is none."""
    known = read(text)
    cells = {fault.name: known.get(fault.name, {}) | anew.get(fault.name, {}) for fault in FAULTS}
    table = [*_HEAD, *(_line(name, cells[name]) for name in cells if cells[name])]
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith(_TITLE)), len(lines))
    end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
    return "\n".join([*lines[:start], *table, *lines[end:], ""])


def _line(name: str, cells: Cells) -> str:
    return f"| {name} | {' | '.join(cells.get(column, '') for column in COLUMNS)} |"


def worse(cells: Mapping[str, Cells]) -> Iterator[str]:
    """Yield each fault that has no cell, and each cell that lost more than it may."""
    for fault in FAULTS:
        found = cells.get(fault.name, {})
        if not found:
            yield f"{fault.name}: is missing"
        for (state, disk), said in found.items():
            if int(said.partition(",")[0]) > fault.may_lose(state):
                yield f"{fault.name}, {state}, {disk}: {said}"
