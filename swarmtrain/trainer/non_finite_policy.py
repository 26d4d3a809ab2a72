"""Policy for steps with a NaN/Inf loss or gradient: stop the run, skip the batch, or roll back to a checkpoint and skip the batch.

For a rollback, the run records in save_dir which batch to skip, and then fails. After the restart it resumes from the newest checkpoint, as
after any failure. The restart counts against the same restart budget.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from swarmtrain.atomic_file import PUBLIC_MODE, write_files_atomically
from swarmtrain.config.schema.trainer import NonFiniteAction
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import CheckpointError, TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint import Progress
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.samples import TokenDataset
from swarmtrain.trainer.metrics.audit_log import replace_non_finite
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import StepResult

_SKIPPED_BATCHES_FILE = "skipped-batches.json"
_HINT = "lower learning_rate_scheduler.learning_rate, or set trainer.detect_anomaly; the newest checkpoint is from before this step"


class NonFinitePolicy:
    """Applies the configured policy for non-finite steps. All methods are collective: every rank must call them."""

    def __init__(self, runtime: Runtime) -> None:
        """Read the positions of the batches to skip from save_dir. Raises CheckpointError if their file cannot be read."""
        self._runtime, self._config = runtime, runtime.config.trainer
        self._consecutive_count = 0
        # Read on all ranks: if each node has its own save_dir, the rank that wrote the record may have run on another node.
        self._skipped_positions: set[int] = set().union(*collectives.run_on_all_ranks(self._read_skipped_positions))

    def skip_excluded_batches(self, progress: Progress) -> Progress:
        """Return `progress`, advanced past all consecutive next batches that are recorded as batches to skip."""
        while progress.consumed_samples in self._skipped_positions:
            progress = replace(progress, consumed_samples=progress.consumed_samples + self._runtime.config.topology.samples_per_step)
        return progress

    def apply_policy(self, step_result: StepResult, first_sample_position: int, data: TokenDataset) -> None:
        """Apply the policy to `step_result`, from a step whose batch begins at sample `first_sample_position` of `data`.

        Does nothing if the step was finite. Raises TrainingError if the policy ends the run or requires a rollback.
        """
        self._consecutive_count = self._consecutive_count + 1 if step_result.non_finite_reason else 0
        if not step_result.non_finite_reason:
            return
        samples = data.build_batch(first_sample_position, self._runtime.config.topology.samples_per_step).ids
        match self._config.non_finite:
            case NonFiniteAction.roll_back:
                record_note = collectives.run_on_rank_zero(
                    lambda: self._record_non_finite_batch(step_result, samples, skip_position=first_sample_position)
                )
                error = TrainingError(
                    f"{step_result.non_finite_reason}; the run rolls back to its newest checkpoint and skips this batch",
                    place=f"step {step_result.number}",
                    hint=record_note,
                )
                error.is_permanent = False
                raise error
            case NonFiniteAction.skip if self._consecutive_count < self._config.non_finite_steps:
                return
        count_text = f"; non-finite for {self._consecutive_count} steps in a row" if self._consecutive_count > 1 else ""
        record_note = collectives.run_on_rank_zero(lambda: self._record_non_finite_batch(step_result, samples))
        raise TrainingError(
            f"{step_result.non_finite_reason}{count_text}",
            place=f"step {step_result.number}",
            hint=f"{_HINT}; {record_note}" if record_note else _HINT,
        )

    def _read_skipped_positions(self) -> list[int]:
        file = self._config.save_dir / _SKIPPED_BATCHES_FILE if self._config.save_dir else None
        try:
            return list(json.loads(file.read_text())) if file and file.exists() else []
        except (OSError, ValueError) as error:
            message = describe_os_error(error) if isinstance(error, OSError) else "is corrupt"
            raise CheckpointError(message, place=str(file), hint="remove the file; then no batch is skipped") from None

    def _record_non_finite_batch(self, step_result: StepResult, sample_ids: Ids, skip_position: int | None = None) -> str:
        """Record the sample ids of a non-finite step in save_dir, and the batch at `skip_position`, if set, as a batch to skip.

        Return a note that names the file; empty if nothing was recorded. Raises CheckpointError if a batch to skip cannot be recorded.
        """
        folder = self._config.save_dir
        if folder is None:
            return ""
        record_path = folder / f"non-finite-step-{step_result.number:08}.json"
        files = {
            record_path: _encode_json(
                {
                    "step": step_result.number,
                    "loss": replace_non_finite(step_result.loss),
                    "reason": step_result.non_finite_reason,
                    "samples": sample_ids.tolist(),
                }
            )
        }
        if skip_position is not None:
            files[folder / _SKIPPED_BATCHES_FILE] = _encode_json(sorted({*self._skipped_positions, skip_position}))
        try:
            write_files_atomically(files)
        except OSError as error:
            if skip_position is None:
                return ""  # report the non-finite values rather than this error
            message = f"{step_result.non_finite_reason}, and the record of the batch to skip cannot be written: {describe_os_error(error)}"
            raise CheckpointError(
                message, place=f"config trainer.save_dir {folder}", hint="check that the disk is mounted and not full"
            ) from None
        return f"the sample ids of the batch are in {record_path}"


def _encode_json(value: Any) -> tuple[bytes, int]:
    return json.dumps(value).encode() + b"\n", PUBLIC_MODE
