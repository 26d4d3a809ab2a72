"""The audit: what each rank did, on disk, a line of JSON a step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.step import Step


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
            hint = "the user that trains needs write access to it"
            raise TrainingError(f"{error.filename}: {reason(error)}", place="config logger.audit_dir", hint=hint) from None

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
