"""Audit log: a JSON Lines file per rank, with the rank's sample ids and the loss of each step."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import IO

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.step import StepResult


class AuditLog:
    """Audit log of one rank. Each step is written to disk before the next step begins."""

    def __init__(self, folder: Path | None, generation: int, rank: int) -> None:
        """Open this rank's file in `folder`; None: record nothing. Raises TrainingError if the file cannot be opened."""
        self._common_fields = {"generation": generation, "rank": rank}
        self._file: IO[str] | None = None
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"world-{generation:06}-rank-{rank:04}.jsonl").open("a")
        except OSError as error:
            hint = "give the training user write access to it"
            raise TrainingError(f"{error.filename}: {describe_os_error(error)}", place="config logger.audit_dir", hint=hint) from None

    def write_step_record(self, result: StepResult) -> None:
        """Write this rank's sample ids in a step, the loss of the global batch, and whether the step was skipped."""
        if self._file is None:
            return
        values = {"step": result.number, "samples": list(result.sample_ids), "loss": replace_non_finite(result.loss)}
        skipped = {"skipped": True} if result.is_skipped else {}
        self._file.write(json.dumps({**self._common_fields, **values, **skipped}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def replace_non_finite(value: float) -> float | None:
    """Return `value`; None if it is NaN/Inf, which JSON cannot represent."""
    return value if math.isfinite(value) else None
