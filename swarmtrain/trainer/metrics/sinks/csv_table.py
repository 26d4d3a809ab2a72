"""Metric sink `metrics.csv`: a table with one row per step."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swarmtrain.trainer.metrics.sinks.metrics_lines import ResumeHistory
from swarmtrain.trainer.metrics.sinks.record_file import RecordFile
from swarmtrain.trainer.runtime import Runtime

CsvRow = dict[str, str]


class CsvTable:
    """CSV table with one column per metric, in the order in which metrics first appear. A later column is empty in earlier rows."""

    def __init__(self, runtime: Runtime, folder: Path, history: ResumeHistory) -> None:
        """Create metrics.csv in `folder`, with the rows of `history`. Raises TrainingError if it cannot be written."""
        rows = _merge_lines_by_step(history.lines)
        self._columns = list(dict.fromkeys(["step", *(name for row in rows for name in row)]))
        self._last_row, earlier_rows = (rows[-1], rows[:-1]) if rows else ({}, [])
        self._file = RecordFile(folder / "metrics.csv", self._encode_rows([_build_header_row(self._columns), *earlier_rows]))
        self._last_row_offset = self._file.size
        """Byte offset of the last row, to which more cells may be added."""
        if self._last_row:
            self._file.append_bytes(self._encode_rows([self._last_row]))

    def write_metrics(self, metrics_line: dict[str, Any]) -> None:
        """Append a row, or add cells to the last row if it has the same step."""
        (row,) = _merge_lines_by_step([metrics_line])
        extends_last_row = bool(self._last_row) and row["step"] == self._last_row["step"]
        if new_columns := [name for name in row if name not in self._columns]:
            self._add_columns(new_columns)
        full_row = {**self._last_row, **row} if extends_last_row else row
        offset = self._last_row_offset if extends_last_row else self._file.size
        if self._file.append_bytes(self._encode_rows([full_row]), offset):
            self._last_row, self._last_row_offset = full_row, offset
        elif extends_last_row:
            self._file.append_bytes(self._encode_rows([self._last_row]))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _add_columns(self, names: list[str]) -> None:
        try:
            with self._file.path.open(newline="") as file:
                rows: list[CsvRow] = list(csv.DictReader(file))
        except OSError:
            return
        columns = [*self._columns, *names]
        *earlier_rows, last_row = [_build_header_row(columns), *rows]
        earlier_content = _encode_csv(earlier_rows, columns)
        if self._file.replace_content(earlier_content + _encode_csv([last_row], columns)):
            self._columns = columns
            self._last_row_offset = len(earlier_content) if rows else self._file.size

    def _encode_rows(self, rows: Iterable[CsvRow]) -> bytes:
        return _encode_csv(rows, self._columns)


def _encode_csv(rows: Iterable[CsvRow], columns: list[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _build_header_row(columns: list[str]) -> CsvRow:
    return {name: name for name in columns}


def _merge_lines_by_step(lines: Iterable[dict[str, Any]]) -> list[CsvRow]:
    """Return one row of text cells for each step in `lines`."""
    rows: dict[int, CsvRow] = {}
    for line in lines:
        rows.setdefault(line["step"], {}).update({name: _format_cell(value) for name, value in line.items()})
    return list(rows.values())


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)
