"""When a checkpoint is due.

A schedule by steps is known to all ranks alike. A schedule by the clock is known to rank 0: it requests a checkpoint, and the request
is part of the sums that ranks exchange at the end of each step anyway, so that all save the same step.

`auto` is Young's interval (CACM 17(9), 1974; Daly refined it, FGCS 22(3), 2006), which minimizes the sum of the time that saving
costs and the work that a failure loses: the square root of twice the cost of a save times the mean time between failures. It is
extended if saving would take more than 1 % of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from swarmtrain.config.schema.interval import AUTO, parse_interval
from swarmtrain.config.schema.trainer import TrainerConfig

MIN_AUTO_INTERVAL_SECONDS = 60.0
"""Seconds until the first checkpoint with `auto`, which measures the costs; no interval is shorter."""
_MEAN_SECONDS_BETWEEN_FAILURES = 24 * 3600.0
"""Seconds: one failed machine per day, which is what a few dozen machines see on a bad day. An error of 4× here is an error of 2× in the
interval.
"""
_MAX_STALL_FRACTION, _MAX_WRITE_FRACTION = 0.01, 0.25
"""Maximum fractions of the time for which checkpoints may stall training, and for which the disk may be busy with them."""


def compute_auto_interval(stall_seconds: float, write_seconds: float) -> float:
    """Return the seconds between two checkpoints, if each stalls training for `stall_seconds` and takes `write_seconds` to write."""
    return max(
        MIN_AUTO_INTERVAL_SECONDS,
        math.sqrt(2 * stall_seconds * _MEAN_SECONDS_BETWEEN_FAILURES),
        stall_seconds / _MAX_STALL_FRACTION,
        write_seconds / _MAX_WRITE_FRACTION,
    )


class SaveInterval:
    """When one world's checkpoints are due. An epoch has `samples_per_epoch` samples, a step has `batch_size`."""

    def __init__(self, config: TrainerConfig, samples_per_epoch: int, batch_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        interval = parse_interval(config.save_interval)
        self._step_multiples = [steps for steps in (interval.steps, config.keep_checkpoints_every) if steps]
        self._samples_between_saves, self._batch_size = (interval.epochs or 0) * samples_per_epoch, batch_size
        self._saves_after_validation = config.keep_best_checkpoints > 0
        self._is_auto = config.save_interval == AUTO
        self._interval_seconds = MIN_AUTO_INTERVAL_SECONDS if self._is_auto else interval.seconds
        self._stall_seconds = self._write_seconds = 0.0
        self._clock = clock
        self._last_save_time = clock()

    def is_due(self, step: int, consumed_samples: int, *, has_validation_loss: bool) -> bool:
        """Return whether a checkpoint is due after `step`, and `consumed_samples` in all. The same on all ranks.

        `has_validation_loss`: the validation loss of this step is known.
        """
        by_step = any(step % steps == 0 for steps in self._step_multiples)
        by_epoch = (
            self._samples_between_saves > 0
            and consumed_samples // self._samples_between_saves > (consumed_samples - self._batch_size) // self._samples_between_saves
        )
        return step > 0 and (by_step or by_epoch or (self._saves_after_validation and has_validation_loss))

    @property
    def is_due_by_clock(self) -> bool:
        """Whether a checkpoint is due by this rank's clock."""
        return self._interval_seconds is not None and self._clock() - self._last_save_time >= self._interval_seconds

    def record_stall(self, seconds: float) -> None:
        """Record that a checkpoint was started, or abandoned, and stalled training for `seconds`."""
        self._last_save_time, self._stall_seconds = self._clock(), seconds
        self._update_interval()

    def record_write(self, seconds: float) -> None:
        """Record that a checkpoint was committed, `seconds` after its start."""
        self._write_seconds = seconds
        self._update_interval()

    def _update_interval(self) -> None:
        if self._is_auto:
            self._interval_seconds = compute_auto_interval(self._stall_seconds, self._write_seconds)
