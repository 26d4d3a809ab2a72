"""Saves checkpoints during training: when one is due, after a stop request, and at the end of the run. Reports committed checkpoints."""

from __future__ import annotations

import time
from typing import NoReturn

from swarmtrain.trainer.checkpoint import CheckpointManager, Progress
from swarmtrain.trainer.checkpoint.save_interval import SaveInterval
from swarmtrain.trainer.health.stop_flag import CollectiveTimeout
from swarmtrain.trainer.metrics import RunReporter


class CheckpointScheduler:
    """Saves checkpoints to the run's save_dir; a no-op if it is not set.

    All methods except `is_due_by_clock` and `report_saved_checkpoints` are collective: every rank must call them.
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
        """True if a checkpoint is due by this rank's clock. Rank 0's value is exchanged with all ranks in the next step."""
        return self._save_interval.is_due_by_clock

    def save_if_due(self, progress: Progress, *, save_requested: bool) -> None:
        """Start saving a checkpoint of `progress` if any rank has requested one or one is due, unless this step is already saved.

        `save_requested`: True if any rank has requested a checkpoint. Raises the errors of CheckpointManager.save.
        """
        is_due = save_requested or self._save_interval.is_due_by_schedule(
            progress.step, progress.consumed_samples, has_validation_loss=progress.validation_loss is not None
        )
        if not is_due or self._checkpoint_manager.save_dir is None or self._checkpoint_manager.latest_step == progress.step:
            return
        start_time = time.monotonic()
        with self._collective_timeout.use_initial_timeout():
            self._checkpoint_manager.save(progress)
        self._save_interval.record_stall(time.monotonic() - start_time)
        self.report_saved_checkpoints()

    def save_and_wait(self, progress: Progress) -> None:
        """Save a checkpoint of `progress` and wait until it is committed. Raises the errors of CheckpointManager.save_and_wait."""
        with self._collective_timeout.use_initial_timeout():
            self._checkpoint_manager.save_and_wait(progress)
        self.report_saved_checkpoints()

    def report_saved_checkpoints(self) -> None:
        """Report the checkpoints that were committed since the last call."""
        for saved in self._checkpoint_manager.take_completed_saves():
            self._reporter.report_checkpoint(saved)
            self._save_interval.record_write(saved.save_seconds)

    def save_and_exit(self, progress: Progress) -> NoReturn:
        """Save a checkpoint of `progress` if at least one step is complete, then exit this rank gracefully by raising SystemExit."""
        if progress.step:
            self.save_and_wait(progress)
        with self._collective_timeout.use_initial_timeout():
            exit_code = self._reporter.report_graceful_exit(progress.step)
        raise SystemExit(exit_code)
