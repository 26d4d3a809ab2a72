"""`metrics.csv`: what metrics.jsonl has, as a table with a row a step."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swarmtrain.trainer.metrics.sinks.growing import GrowingFile
from swarmtrain.trainer.metrics.sinks.past import Past
from swarmtrain.trainer.runtime import Runtime

Row = dict[str, str]


class Table:
    """Columns are in the order in which they came up. One that comes up later is empty in the rows before."""

    def __init__(self, here: Runtime, folder: Path, past: Past) -> None:
        """Write the table of all that stands. Raises TrainingError."""
        rows = _merged(past.lines)
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        self._last, before = (rows[-1], rows[:-1]) if rows else ({}, [])
        self._file = GrowingFile(folder / "metrics.csv", self._text([_header(self._columns), *before]))
        self._at = self._file.end
        """Where the last row begins, which may get more cells."""
        if self._last:
            self._file.append(self._text([self._last]))

    def write(self, values: dict[str, Any]) -> None:
        """Add a row, or, to that of the same step, cells."""
        (row,) = _merged([values])
        more = bool(self._last) and row["step"] == self._last["step"]
        if new := [name for name in row if name not in self._columns]:
            self._widen(new)
        whole = {**self._last, **row} if more else row
        at = self._at if more else self._file.end
        if self._file.append(self._text([whole]), at):
            self._last, self._at = whole, at
        elif more:
            self._file.append(self._text([self._last]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _widen(self, names: list[str]) -> None:
        try:
            with self._file.path.open(newline="") as file:
                rows: list[Row] = list(csv.DictReader(file))
        except OSError:
            return
        columns = [*self._columns, *names]
        *before, last = [_header(columns), *rows]
        head = _text(before, columns)
        if self._file.replace(head + _text([last], columns)):
            self._columns = columns
            self._at = len(head) if rows else self._file.end

    def _text(self, rows: Iterable[Row]) -> bytes:
        return _text(rows, self._columns)


def _text(rows: Iterable[Row], columns: list[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _header(columns: list[str]) -> Row:
    return {name: name for name in columns}


def _merged(lines: Iterable[dict[str, Any]]) -> list[Row]:
    """Return one row for each step of `lines`, as text."""
    rows: dict[int, Row] = {}
    for line in lines:
        rows.setdefault(line["step"], {}).update({name: _cell(value) for name, value in line.items()})
    return list(rows.values())


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
