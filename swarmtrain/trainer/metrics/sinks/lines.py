"""`metrics.jsonl`: a line of JSON a step, however often the run was interrupted; and other files of lines that have a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.metrics.sinks.growing import GrowingFile
from swarmtrain.trainer.metrics.sinks.past import Past

NAME = "metrics.jsonl"


class MetricsFile:
    """What a run has told, for programs and for the run's own next world."""

    def __init__(self, folder: Path, step: int, name: str = NAME) -> None:
        """Open the file `name` in `folder`, and drop what an earlier world wrote past `step`. Raises TrainingError."""
        kept = [(line, values) for line in _readable(folder / name) if (values := _read(line)) and values["step"] <= step]
        self._file = GrowingFile(folder / name, "".join(line for line, _ in kept).encode())
        self.past = Past(step, [values for _, values in kept])

    def write(self, values: dict[str, Any]) -> None:
        """Append one line. A disk that takes none is told once, and training goes on."""
        self._file.append((json.dumps(values) + "\n").encode())

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._file.path

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def last_step(folder: Path) -> int:
    """Return the last step that stands in the file in `folder`; 0 if there is none. Raises TrainingError."""
    return max((values["step"] for line in _readable(folder / NAME) if (values := _read(line))), default=0)


def add_missing(folder: Path, step: int, values: dict[str, Any]) -> None:
    """Append a step's line to the `metrics.jsonl` in `folder`, where it is the next: who writes it has died before. Raises OSError."""
    path = folder / NAME
    lines = _lines(path)
    whole = [each for line in lines if (each := _read(line)) and each["step"] <= step]
    if whole and whole[-1]["step"] == step - 1:
        torn = "" if lines[-1].endswith("\n") else "\n"
        with path.open("a") as file:
            file.write(torn + json.dumps({"step": step, **values}) + "\n")


def _readable(path: Path) -> list[str]:
    try:
        return _lines(path)
    except OSError as error:
        hint = "the user that trains must be able to read it"
        raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.log_dir", hint=hint) from None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _read(line: str) -> dict[str, Any] | None:
    """Return what a line says, or None if it is torn."""
    try:
        values = json.loads(line)
        return {**values, "step": int(values["step"])} if line.endswith("\n") else None
    except (ValueError, KeyError, TypeError):
        return None
