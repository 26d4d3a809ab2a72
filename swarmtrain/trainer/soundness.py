"""What becomes of a step whose loss or gradient is no number: the run ends, the batch is passed over, or the run goes back first.

To go back is to fail, with a note in save_dir of which batch to pass over: the next world begins at the newest checkpoint,
as after any failure, and counts against the same budget.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from swarmtrain.config.files import OPEN, reason, write_all
from swarmtrain.config.trainer import NonFinite
from swarmtrain.errors import CheckpointError, TrainingError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import Progress
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.metrics.files import finite
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import Step

_PASSED_OVER = "passed-over.json"
_HINT = "lower learning_rate_scheduler.learning_rate, or set trainer.detect_anomaly; the newest checkpoint is from before this step"


class Soundness:
    """Judges the steps of one world. All methods but `past` are called by all ranks together."""

    def __init__(self, here: Runtime) -> None:
        """Learn which batches are passed over. Raises CheckpointError if the note of them cannot be read."""
        self._here, self._config = here, here.config.trainer
        self._in_a_row = 0
        # From all ranks: where each node has its own save_dir, the rank that wrote it may have been on another.
        self._passed_over: set[int] = set().union(*agreement.by_every_rank(self._read))

    def past(self, progress: Progress) -> Progress:
        """Return `progress`, behind what it has come to of the batches that are passed over."""
        while progress.consumed_samples in self._passed_over:
            progress = replace(progress, consumed_samples=progress.consumed_samples + self._here.config.topology.global_batch)
        return progress

    def judge(self, made: Step, position: int, data: Samples) -> None:
        """Go on after step `made`, whose batch is that of `data` at `position`. Raises TrainingError if the run cannot."""
        self._in_a_row = self._in_a_row + 1 if made.unsound else 0
        if not made.unsound:
            return
        samples = data.batch(position, self._here.config.topology.global_batch).ids
        match self._config.non_finite:
            case NonFinite.roll_back:
                where = agreement.by_first_rank(lambda: self._leave(made, samples, pass_over=position))
                error = TrainingError(f"{made.unsound}; goes back, and past this batch", place=f"step {made.number}", hint=where)
                error.lasting = False
                raise error
            case NonFinite.skip if self._in_a_row < self._config.non_finite_steps:
                return
        times = f"; so were {self._in_a_row} steps in a row" if self._in_a_row > 1 else ""
        where = agreement.by_first_rank(lambda: self._leave(made, samples))
        raise TrainingError(f"{made.unsound}{times}", place=f"step {made.number}", hint=f"{_HINT}; {where}" if where else _HINT)

    def _read(self) -> list[int]:
        file = self._config.save_dir / _PASSED_OVER if self._config.save_dir else None
        try:
            return list(json.loads(file.read_text())) if file and file.exists() else []
        except (OSError, ValueError) as error:
            why = reason(error) if isinstance(error, OSError) else "is torn"
            raise CheckpointError(why, place=str(file), hint="remove it: no batch is passed over then") from None

    def _leave(self, made: Step, samples: Ids, pass_over: int | None = None) -> str:
        """Write down what the batch was, and that it is to be passed over; return where that stands, nothing if it does not.

        Raises CheckpointError if a batch that is to be passed over cannot be written down.
        """
        folder = self._config.save_dir
        if folder is None:
            return ""
        told = folder / f"non-finite-step-{made.number:08}.json"
        files = {told: _json({"step": made.number, "loss": finite(made.loss), "why": made.unsound, "samples": samples.tolist()})}
        if pass_over is not None:
            files[folder / _PASSED_OVER] = _json(sorted({*self._passed_over, pass_over}))
        try:
            write_all(files)
        except OSError as error:
            if pass_over is None:
                return ""  # that the numbers went wrong is what is to be told
            why = f"{made.unsound}, and that the batch is to be passed over cannot be written down: {reason(error)}"
            raise CheckpointError(why, place=f"config trainer.save_dir {folder}", hint="is the disk full, or gone?") from None
        return f"the ids of its samples stand in {told}"


def _json(value: Any) -> tuple[bytes, int]:
    return json.dumps(value).encode() + b"\n", OPEN
