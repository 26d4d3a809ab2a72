"""Metrics and audit on disk, a line of JSON a step."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError

_WRITABLE = "the user that trains needs write access to it"


class MetricsFile:
    """`metrics.jsonl`: every step stands once, however often the run was interrupted."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        """Open the file in `folder`, and drop what an earlier world wrote past step `resumed_at`. Raises TrainingError."""
        self.path = folder / "metrics.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            kept = "".join(line for line in _lines(self.path) if _stands(line, resumed_at))
            aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
            aside.write_text(kept)
            # By rename, so that a world that was cut off goes on writing into a file that nobody sees.
            aside.replace(self.path)
            self._file: IO[str] = self.path.open("a")
        except OSError as error:
            raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.log_dir", hint=_WRITABLE) from None

    def write(self, values: dict[str, Any]) -> None:
        """Append one line."""
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()

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

    def write(self, step: int, samples: Sequence[int], loss: float) -> None:
        """Record that this rank has made `step` with `samples`, and that the whole batch's loss was `loss`."""
        if self._file is None:
            return
        self._file.write(json.dumps({**self._same, "step": step, "samples": list(samples), "loss": loss}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


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
