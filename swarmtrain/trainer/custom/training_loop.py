"""What every training loop has: progress, checkpoints when they are due, and a stop of all ranks after the same step."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.checkpoint import CheckpointManager, Progress, SavedCheckpoint
from swarmtrain.trainer.checkpoint.save_interval import SaveInterval
from swarmtrain.trainer.checkpoint.training_state import CheckpointState
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.metrics import RunReporter
from swarmtrain.trainer.runtime import Runtime


class TrainingLoop(ABC):
    """The steps of a run. All methods are collective: every rank must call them."""

    required_calls: Mapping[str, str] = {
        "save_if_due": "run.save_if_due()",
        "stop_requested": "if run.stop_requested: run.save_and_exit()",
    }
    """Methods that the body of the loop must call, and how."""

    def __init__(self, runtime: Runtime, state: CheckpointState, data_fingerprint: str, stop_flag: StopFlag, reporter: RunReporter) -> None:
        """Claim save_dir for this world. Raises the errors of CheckpointManager."""
        self.runtime, self.reporter, self._stop = runtime, reporter, stop_flag
        self.checkpoint_manager = CheckpointManager(runtime, state, data_fingerprint, reporter.report_warning)
        self._save_interval: SaveInterval | None = None
        self._called_names: set[str] = set()
        self._is_save_pending = False
        """Whether a checkpoint was due at an earlier step that could not be saved."""
        self.progress = Progress()

    @abstractmethod
    def iterate_steps(self, data: Any, epochs: int | None, max_steps: int | None, global_batch_size: int | None) -> Iterator[Any]:
        """Yield the remaining batches of `data`: see Run.steps."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the last step is complete."""

    @property
    @abstractmethod
    def any_rank_requests_stop(self) -> bool:
        """Whether a stop was requested on any rank."""

    @property
    @abstractmethod
    def any_rank_requests_save(self) -> bool:
        """Whether any rank requests a checkpoint of this step."""

    def can_save(self) -> bool:
        """Return whether this step can be saved; else the checkpoint is saved after the next step for which it can. Equal on all ranks."""
        return True

    @abstractmethod
    def check_before_save(self) -> None:
        """Raise TrainingError if the state must not be saved."""

    def describe_result(self) -> dict[str, Any]:
        """Return what the event that reports the end of the run says about its result."""
        return {}

    def use_save_timeout(self) -> AbstractContextManager[None]:
        """Context manager for exchanges between ranks that may wait for a slow disk."""
        return nullcontext()

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was requested on any rank."""
        self._called_names.add("stop_requested")
        return self.any_rank_requests_stop

    def check_required_calls(self) -> None:
        """Raise TrainingError if the body of the loop has not made all `required_calls`."""
        if missing_calls := [line for name, line in self.required_calls.items() if name not in self._called_names]:
            hint = "call them in each step; without run.steps() none is required"
            raise TrainingError(f"the loop lacks `{'` and `'.join(missing_calls)}`", place="steps", hint=hint)

    def save_if_due(self, metric: float | None) -> list[SavedCheckpoint]:
        """Start saving a checkpoint of this step if one is due. Return the checkpoints that this rank has committed since the last call.

        `metric`: validation metric of this step, if it is not evaluated by the loop. Raises WorldError if a newer world has taken over,
        TrainingError outside the loop over steps().
        """
        self._called_names.add("save_if_due")
        if self._save_interval is None:
            raise TrainingError(
                "was called outside of the loop over run.steps()", place="save_if_due", hint="call it inside the loop over run.steps()"
            )
        if metric is not None:
            self.progress = self.progress.with_validation_loss(metric)
        is_due = self.any_rank_requests_save or self._save_interval.is_due_by_schedule(
            self.progress.step, self.progress.consumed_samples, has_validation_loss=self.progress.validation_loss is not None
        )
        has_new_step = self.checkpoint_manager.save_dir is not None and self.checkpoint_manager.latest_step != self.progress.step
        self._is_save_pending = has_new_step and (self._is_save_pending or is_due)
        if self._is_save_pending and self.can_save():
            self._is_save_pending = False
            self.check_before_save()
            start_time = time.monotonic()
            with self.use_save_timeout():
                self.checkpoint_manager.save(self.progress)
            self._save_interval.record_stall(time.monotonic() - start_time)
        return self._take_completed_saves()

    def save_and_wait(self) -> list[SavedCheckpoint]:
        """Save a checkpoint of this step, and wait until it is committed. Step 0 is saved only if it is the last.

        Return the checkpoints that this rank has committed since the last call. Raises CheckpointError if the checkpoint cannot
        be written, WorldError if a newer world has taken over, TrainingError if the state must not be saved.
        """
        if self.progress.step or self.is_done:
            self.check_before_save()
            with self.use_save_timeout():
                self.checkpoint_manager.save_and_wait(self.progress)
        return self._take_completed_saves()

    def _take_completed_saves(self) -> list[SavedCheckpoint]:
        checkpoints = self.checkpoint_manager.take_completed_saves()
        for saved in checkpoints:
            if self._save_interval:
                self._save_interval.record_write(saved.save_seconds)
        return checkpoints
