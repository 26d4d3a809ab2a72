"""Schedule of checkpoints: by steps, by epochs, by time, or automatic.

A schedule by steps or epochs gives the same result on all ranks. A schedule by time uses the clock of rank 0: its save request is
included in the all-reduce at the end of each step, so that all ranks save the same step.

`auto` is Young's interval (CACM 17(9), 1974; refined by Daly, FGCS 22(3), 2006), which minimizes the expected time lost to saving and to
recomputation after failures: sqrt(2 x cost of a save x mean time between failures). The interval is longer if saves would otherwise stall
training for more than 1 % of the time, or keep the disk busy for more than 25 % of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from swarmtrain.config.schema.fields.interval import AUTO, parse_interval
from swarmtrain.config.schema.trainer import TrainerConfig

MIN_AUTO_INTERVAL_SECONDS = 60.0
"""Minimum interval in seconds with `auto`. The first checkpoint is due after this time; its cost determines the next interval."""
_MEAN_SECONDS_BETWEEN_FAILURES = 24 * 3600.0
"""Assumed mean time between failures in seconds: one machine failure per day.

This is a pessimistic failure rate for a few dozen machines. If the assumption is wrong by a factor of 4, the interval is wrong by a factor
of 2.
"""
_MAX_STALL_FRACTION, _MAX_WRITE_FRACTION = 0.01, 0.25
"""Maximum fraction of the time for which checkpoints may stall training, and for which the disk may be busy writing them."""


def compute_auto_interval(stall_seconds: float, write_seconds: float) -> float:
    """Return the `auto` interval between two checkpoints in seconds: Young's interval, increased to its lower bounds.

    Each checkpoint stalls training for `stall_seconds`, and takes `write_seconds` to write.
    """
    return max(
        MIN_AUTO_INTERVAL_SECONDS,
        math.sqrt(2 * stall_seconds * _MEAN_SECONDS_BETWEEN_FAILURES),
        stall_seconds / _MAX_STALL_FRACTION,
        write_seconds / _MAX_WRITE_FRACTION,
    )


class SaveInterval:
    """Determines when a checkpoint is due. `global_batch_size`: samples per step."""

    def __init__(
        self, config: TrainerConfig, samples_per_epoch: int, global_batch_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        interval = parse_interval(config.save_interval)
        self._step_multiples = [steps for steps in (interval.steps, config.keep_checkpoints_every) if steps]
        self._samples_between_saves, self._batch_size = (interval.epochs or 0) * samples_per_epoch, global_batch_size
        self._saves_after_validation = config.keep_best_checkpoints > 0
        self._is_auto = config.save_interval == AUTO
        self._interval_seconds = MIN_AUTO_INTERVAL_SECONDS if self._is_auto else interval.seconds
        self._stall_seconds = self._write_seconds = 0.0
        self._clock = clock
        self._last_save_time = clock()

    def is_due_by_schedule(self, step: int, consumed_samples: int, *, has_validation_loss: bool) -> bool:
        """Return whether a checkpoint is due after `step` by the schedule of steps, epochs and validations. Equal on all ranks.

        `consumed_samples`: number of samples consumed so far. `has_validation_loss`: whether the validation loss was evaluated after this
        step.
        """
        by_step = any(step % steps == 0 for steps in self._step_multiples)
        by_epoch = (
            self._samples_between_saves > 0
            and consumed_samples // self._samples_between_saves > (consumed_samples - self._batch_size) // self._samples_between_saves
        )
        return step > 0 and (by_step or by_epoch or (self._saves_after_validation and has_validation_loss))

    @property
    def is_due_by_clock(self) -> bool:
        """True if a checkpoint is due by this rank's clock."""
        return self._interval_seconds is not None and self._clock() - self._last_save_time >= self._interval_seconds

    def record_stall(self, seconds: float) -> None:
        """Record that saving a checkpoint has stalled training for `seconds`, and restart the interval from now."""
        self._last_save_time, self._stall_seconds = self._clock(), seconds
        self._update_interval()

    def record_write(self, seconds: float) -> None:
        """Record that a checkpoint was committed `seconds` after its save started."""
        self._write_seconds = seconds
        self._update_interval()

    def _update_interval(self) -> None:
        if self._is_auto:
            self._interval_seconds = compute_auto_interval(self._stall_seconds, self._write_seconds)
