"""Metric sink `metrics.jsonl`: JSON lines with the metrics of each step. When a run resumes, the lines of later steps are removed.

Also used for other JSON Lines files whose records have a step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.sinks.metrics_lines import ResumeHistory
from swarmtrain.trainer.metrics.sinks.record_file import RecordFile

FILE_NAME = "metrics.jsonl"


class MetricsFile:
    """JSON Lines file of metrics, which other programs read, and the run itself when it resumes."""

    def __init__(self, folder: Path, resumed_step: int, name: str = FILE_NAME) -> None:
        """Open the file `name` in `folder`, and remove lines of steps after `resumed_step`.

        Raises TrainingError if it cannot be read or written.
        """
        retained = [
            (line, values)
            for line in _read_metrics_lines_or_raise(folder / name)
            if (values := _parse_metrics_line(line)) and values["step"] <= resumed_step
        ]
        self._file = RecordFile(folder / name, "".join(line for line, _ in retained).encode())
        self.history = ResumeHistory(resumed_step, [values for _, values in retained])

    def write_metrics(self, metrics_line: dict[str, Any]) -> None:
        """Append one line. The first write error is logged as a warning, and training continues."""
        self._file.append_bytes((json.dumps(metrics_line) + "\n").encode())

    @property
    def path(self) -> Path:
        """Path of the file."""
        return self._file.path

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_last_metrics_step(folder: Path) -> int:
    """Return the last step in the `metrics.jsonl` of `folder`; 0 if there is none. Raises TrainingError if the file cannot be read."""
    return max(
        (values["step"] for line in _read_metrics_lines_or_raise(folder / FILE_NAME) if (values := _parse_metrics_line(line))), default=0
    )


def append_missing_step_metrics(folder: Path, step: int, metrics: dict[str, Any]) -> None:
    """Append a line for `step` to the `metrics.jsonl` of `folder`, if the file's last step is the previous step.

    Used if rank 0 died before writing this line. Raises OSError if the file cannot be read or written.
    """
    path = folder / FILE_NAME
    lines = _read_metrics_lines(path)
    complete = [each for line in lines if (each := _parse_metrics_line(line)) and each["step"] <= step]
    if complete and complete[-1]["step"] == step - 1:
        separator = "" if lines[-1].endswith("\n") else "\n"
        with path.open("a") as file:
            file.write(separator + json.dumps({"step": step, **metrics}) + "\n")


def _read_metrics_lines_or_raise(path: Path) -> list[str]:
    try:
        return _read_metrics_lines(path)
    except OSError as error:
        hint = "give the training user read access to it"
        raise TrainingError(f"{error.filename}: {describe_os_error(error)}", place="config logger.log_dir", hint=hint) from None


def _read_metrics_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _parse_metrics_line(line: str) -> dict[str, Any] | None:
    """Return the values in the JSON text `line`; None if it is incomplete or invalid."""
    try:
        values = json.loads(line)
        return {**values, "step": int(values["step"])} if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
