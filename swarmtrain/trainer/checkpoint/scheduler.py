"""Checkpoints during training: when they are due, when a stop is requested, and at the end; and how they are reported."""

from __future__ import annotations

import time
from typing import NoReturn

from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.save_interval import SaveInterval
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout
from swarmtrain.trainer.metrics import RunReporter


class CheckpointScheduler:
    """Saves into the run's save_dir, if it has one.

    All methods but `is_due_by_clock` and `report_saved` are called by all ranks together.
    """

    def __init__(
        self,
        checkpoint_manager: CheckpointManager,
        save_interval: SaveInterval,
        collective_timeout: CollectiveTimeout,
        reporter: RunReporter,
    ) -> None:
        self._checkpoint_manager, self._save_interval, self._collective_timeout, self._reporter = (
            checkpoint_manager,
            save_interval,
            collective_timeout,
            reporter,
        )

    @property
    def is_due_by_clock(self) -> bool:
        """Whether a checkpoint is due by this rank's clock, which all ranks learn at the end of the next step."""
        return self._save_interval.is_due_by_clock

    def save_if_due(self, progress: Progress, *, save_requested: bool) -> None:
        """Start a checkpoint if some rank requested one, or one is due after this step, unless there is one of this step.

        Raises what CheckpointManager.save does.
        """
        is_due = save_requested or self._save_interval.is_due(
            progress.step, progress.consumed_samples, has_validation_loss=progress.validation_loss is not None
        )
        if not is_due or self._checkpoint_manager.save_dir is None or self._checkpoint_manager.latest_step == progress.step:
            return
        start_time = time.monotonic()
        with self._collective_timeout.suspended():
            self._checkpoint_manager.save(progress)
        self._save_interval.record_stall(time.monotonic() - start_time)
        self.report_saved()

    def save_and_wait(self, progress: Progress) -> None:
        """Return when the checkpoint of this step is committed. Raises what CheckpointManager.save_and_wait does."""
        with self._collective_timeout.suspended():
            self._checkpoint_manager.save_and_wait(progress)
        self.report_saved()

    def report_saved(self) -> None:
        """Report the checkpoints committed since the last call."""
        for saved in self._checkpoint_manager.take_completed_saves():
            self._reporter.report_checkpoint(saved)
            self._save_interval.record_write(saved.save_seconds)

    def save_and_exit(self, progress: Progress) -> NoReturn:
        """Save this step, and exit this rank gracefully."""
        if progress.step:
            self.save_and_wait(progress)
        with self._collective_timeout.suspended():
            exit_code = self._reporter.report_graceful_exit(progress.step)
        raise SystemExit(exit_code)
