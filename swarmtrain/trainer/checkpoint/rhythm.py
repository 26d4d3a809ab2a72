"""When a checkpoint is due.

What goes by steps, all ranks know alike. What goes by the clock, rank 0 knows: it wishes for one, and its wish travels
with the sums that ranks exchange at the end of each step anyway, so that all save the same step.

`auto` is Young's interval (CACM 17(9), 1974; Daly refined it, FGCS 22(3), 2006), at which the time that saving costs
and the work that a failure loses are least together: the square root of twice the cost of a save times the mean time
between failures. It is made longer where saving would take more than a hundredth of the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from swarmtrain.config.interval import AUTO, read
from swarmtrain.config.trainer import TrainerConfig

FIRST = 60.0
"""Seconds until the first one by `auto`, which measures what they cost; no interval is shorter."""
_BETWEEN_FAILURES = 24 * 3600.0
"""Seconds: a machine a day is what a few dozen lose on a bad one. Being wrong by four times is wrong by two in the interval."""
_STANDING_STILL, _WRITING = 0.01, 0.25
"""Most of the time that training may stand still for checkpoints, and that the disk may be busy with them."""


def auto(stood: float, wrote: float) -> float:
    """Return the seconds between two checkpoints, where training stands still `stood` seconds for one, and to write it takes `wrote`."""
    return max(FIRST, math.sqrt(2 * stood * _BETWEEN_FAILURES), stood / _STANDING_STILL, wrote / _WRITING)


class Rhythm:
    """The times of one world's checkpoints. An epoch has `samples`, a step `batch` of them."""

    def __init__(self, config: TrainerConfig, samples: int, batch: int, now: Callable[[], float] = time.monotonic) -> None:
        interval = read(config.save_interval)
        self._steps = [steps for steps in (interval.steps, config.keep_checkpoints_every) if steps]
        self._samples, self._batch = (interval.epochs or 0) * samples, batch
        self._best = config.keep_best_checkpoints > 0
        self._auto = config.save_interval == AUTO
        self._seconds = FIRST if self._auto else interval.seconds
        self._stood = self._wrote = 0.0
        self._now = now
        self._since = now()

    def due(self, step: int, consumed: int, *, measured: bool) -> bool:
        """Whether one is due after `step` and `consumed` samples in all; `measured`: its held-out loss is known.

        The same on all ranks.
        """
        by_step = any(step % steps == 0 for steps in self._steps)
        by_epoch = self._samples > 0 and consumed // self._samples > (consumed - self._batch) // self._samples
        return step > 0 and (by_step or by_epoch or (self._best and measured))

    @property
    def wished(self) -> bool:
        """Whether one is due by this rank's clock."""
        return self._seconds is not None and self._now() - self._since >= self._seconds

    def stood(self, seconds: float) -> None:
        """A checkpoint has been begun, or given up; training stood still for it."""
        self._since, self._stood = self._now(), seconds
        self._adapt()

    def wrote(self, seconds: float) -> None:
        """A checkpoint stands, so many seconds after it was due."""
        self._wrote = seconds
        self._adapt()

    def _adapt(self) -> None:
        if self._auto:
            self._seconds = auto(self._stood, self._wrote)
