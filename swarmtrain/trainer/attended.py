"""A step under the eyes of all that watch over steps: what hangs, what is no number, what has no room, how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from torch import Tensor

from swarmtrain.trainer import checks, shortage
from swarmtrain.trainer.collector import Collector
from swarmtrain.trainer.data.samples import Samples
from swarmtrain.trainer.guard import Patience
from swarmtrain.trainer.metrics.pace import Pace, Work
from swarmtrain.trainer.metrics.profile import Profile
from swarmtrain.trainer.metrics.recorder import Recorder
from swarmtrain.trainer.metrics.timeline import Timeline
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parts import Parts
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.watchdog import Watchdog


class Attended:
    """While entered, hangs are noticed, and garbage is collected between steps only. `measures` comes before the first step."""

    _pace: Pace
    _parts: Parts
    _timeline: Timeline
    _recorder: Recorder
    taken: Mapping[str, float]
    """Seconds that each part of a step took, of the last that is known."""

    def __init__(self, here: Runtime, model: ParallelModel, optimizer: Optimizer, patience: Patience) -> None:
        self._here, self._model, self._optimizer, self._patience = here, model, optimizer, patience
        self._watchdog, self._collector, self._profile = Watchdog(here), Collector(), Profile(here)

    def __enter__(self) -> Self:
        self._watchdog.__enter__()
        self._collector.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._profile.close()
        if kind is None:
            self._timeline.close()
            self._recorder.close()
        self._collector.__exit__(kind, error, trace)
        self._watchdog.__exit__(kind, error, trace)

    def measures(self, data: Samples, step: int) -> Parts:
        """Begin to measure after `step`, and return the clock that is to be told what begins. Called by all ranks together.

        Raises TrainingError if a file cannot be opened.
        """
        self._recorder = Recorder(self._here, self._model, step)
        self._pace, self._parts = Pace(self._here, self._model, data), Parts(self._here.device)
        self._timeline = Timeline(self._here, self._model.mesh, self._parts)
        return self._parts

    def passed(self) -> None:
        """The passes of the step are made, and gradients summed. Called by all ranks together."""
        self._recorder.passed()

    def compared(self) -> list[Work] | None:
        """Return the work of all ranks, by rank, if it is time to compare. Called by all after each step."""
        return self._pace.compared()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Make step `number` in the body. Called by all ranks together."""
        self._profile.before_step()
        self._recorder.before_step(number)
        begun, place = time.monotonic(), f"step {number} on rank {self._here.rank}"
        with self._watchdog.step(number), checks.explained(number), shortage.told(place, self._held), self._pace.step():
            yield
        self._patience.step_took(time.monotonic() - begun)
        self._collector.after_step(number)
        self._profile.after_step()
        self.taken = self._parts.step()
        self._timeline.after_step(number)

    def _held(self) -> dict[str, list[Tensor | None]]:
        parameters = list(self._model.parameters.values())
        gradients = [parameter.grad for parameter in parameters]
        return {"parameters": [*parameters], "gradients": gradients, "optimizer state": [*self._optimizer.moments().values()]}
