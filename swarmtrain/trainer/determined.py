"""A trial of Determined AI, if this run is one: its master may ask the run to leave, and is told its losses.

Nothing here is switched on: Determined has put its own package into the container, and the variables by which it is known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from swarmtrain import world
from swarmtrain.errors import TrainingError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.metrics.sinks.texts import texts
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.wire import EXIT_PLANNED

LOG = logging.getLogger("swarmtrain")
_EVERY, _LEAVE = 0.2, 30.0
"""Seconds between two looks at whether the master asks; for what it has not heard yet when the run ends."""


class Trial:
    """The trial as rank 0 sees it. On other ranks, and outside a trial, it asks for nothing and hears nothing."""

    def __init__(self, here: Runtime) -> None:
        """Join the trial. Called by all ranks together; raises TrainingError on each of them if that fails."""
        self._interval, self._steps = here.config.logger.log_interval, here.config.trainer.train_iterations
        self._context: Any = None
        self._asked = self._deaf = False
        if world.in_trial(os.environ):
            agreement.by_first_rank(self._join)

    def asks(self) -> bool:
        """Return whether the master wants the run to make room."""
        return self._asked

    def leaves(self) -> int:
        """The run leaves with all saved. Return the exit code that says so. Called by all ranks together.

        If that was the master's wish it is told to start the trial again, and the code is 0: any other looks like a failure there.
        """
        return EXIT_PLANNED if not world.in_trial(os.environ) or not agreement.by_first_rank(self._acknowledged) else 0

    def write(self, values: dict[str, Any]) -> None:
        """Report `values`, one of which is `step`: held-out losses as validation, of the steps those that are logged."""
        if self._context is None or self._deaf or texts(values):
            return
        step, metrics = values["step"], {name: value for name, value in values.items() if name != "step" and value is not None}
        if "held_out_loss" in metrics:
            self._try(lambda: self._context.train.report_validation_metrics(step, metrics))
        elif step % self._interval == 0 or step == self._steps:
            self._try(lambda: self._context.train.report_training_metrics(step, metrics))

    def close(self) -> None:
        """Send what is left."""
        if self._context is not None:
            self._in_time(self._context.close)

    def _join(self) -> None:
        try:
            from determined import core
        except ImportError:
            raise TrainingError("determined is not installed", place="Determined trial", hint="pip install determined") from None
        try:
            # The ranks agree by themselves, so that one of them is all that Determined needs to know.
            self._context = core.init(
                distributed=core.DummyDistributedContext(),
                preempt_mode=core.PreemptMode.ChiefOnly,
                tensorboard_mode=core.TensorboardMode.MANUAL,
            )
            self._context.start()
        except Exception as error:  # whatever its client raises
            raise TrainingError(str(error), place="Determined trial", hint="its master must be reachable from the container") from error
        threading.Thread(target=self._try, args=(self._listen,), daemon=True).start()

    def _listen(self) -> None:
        """Wait until the master asks. A thread of its own, since the first answer of one that is away takes minutes."""
        while not self._context.preempt.should_preempt(auto_ack=False):
            time.sleep(_EVERY)
        self._asked = True

    def _acknowledged(self) -> bool:
        return self._asked and self._in_time(self._context.preempt.acknowledge_preemption_signal)

    def _in_time(self, act: Callable[[], object]) -> bool:
        """Run `act`, for at most half a minute. Return whether it is done."""
        done: list[bool] = []
        acting = threading.Thread(target=lambda: done.append(self._try(act)), daemon=True)
        acting.start()
        acting.join(_LEAVE)
        return done == [True]

    def _try(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception as error:  # noqa: BLE001  # whatever its client raises: training goes on
            LOG.warning("Determined: what the run has come to is no longer told: %s", error)
            self._deaf = True
            return False
        return True
