"""Metrics and audit on disk, a line of JSON a step."""

from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path
from typing import IO, Any

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.step import Step

LOG = logging.getLogger("swarmtrain")
_WRITABLE = "the user that trains needs write access to it"


class MetricsFile:
    """`metrics.jsonl`: every step stands once, however often the run was interrupted."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        """Open the file in `folder`, and drop what an earlier world wrote past step `resumed_at`. Raises TrainingError."""
        self.path = folder / "metrics.jsonl"
        self._torn = self._told = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = "".join(line for line in _lines(self.path) if _stands(line, resumed_at))
            aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            aside.write_text(kept)
            # By rename, so that a world that was cut off goes on writing into a file that nobody sees.
            aside.replace(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.log_dir", hint=_WRITABLE) from None

    def write(self, values: dict[str, Any]) -> None:
        """Append one line. A disk that takes none is told once, and training goes on."""
        line = (json.dumps(values) + "\n").encode()
        try:
            # What is left of a line that found no room would be joined to the next one.
            self._torn = self._file.write(b"\n" + line if self._torn else line) < len(line)
        except OSError as error:
            if not self._told:
                LOG.warning("%s: no more metrics while it cannot be written: %s", self.path, reason(error))
            self._told = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class AuditFile:
    """What one rank of one world did, step by step, on disk before the next step begins."""

    def __init__(self, folder: Path | None, token: int, rank: int) -> None:
        """Open this rank's file in `folder`; None: record nothing. Raises TrainingError."""
        self._same = {"token": token, "rank": rank}
        self._file: IO[str] | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"world-{token:06}-rank-{rank:04}.jsonl").open("a")
        except OSError as error:
            raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.audit_dir", hint=_WRITABLE) from None

    def write(self, made: Step) -> None:
        """Record the samples that this rank had in a step, what the whole batch's loss was, and whether the step was skipped."""
        if self._file is None:
            return
        values = {"step": made.number, "samples": list(made.samples), "loss": finite(made.loss)}
        skipped = {"skipped": True} if made.skipped else {}
        self._file.write(json.dumps({**self._same, **values, **skipped}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def finite(value: float) -> float | None:
    """Return `value`, or None if JSON has no word for it."""
    return value if math.isfinite(value) else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return []


def _stands(line: str, resumed_at: int) -> bool:
    try:
        values = json.loads(line)
        # The held-out loss of the step itself is measured again.
        return line.endswith("\n") and int(values["step"]) <= resumed_at - ("held_out_loss" in values)
    except (ValueError, KeyError, TypeError):
        return False
