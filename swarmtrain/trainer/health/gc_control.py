"""Control of Python's garbage collector: all ranks run it at the same step.

By default each rank's garbage collector runs at a different time, and scans all objects that imports have created, while all other ranks
wait in the next collective. So it is disabled during steps. Objects that exist after the first steps are frozen
permanently, and newer objects are collected at an interval of steps that is the same on all ranks.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

_FREEZE_AFTER_STEPS = 2
"""Number of steps after which all long-lived objects exist."""
_INTERVAL_STEPS = 50


class GcController:
    """Context manager that disables automatic garbage collection; `collect_garbage_if_due` runs it."""

    def __init__(self) -> None:
        self._steps_done = 0
        self._was_enabled = True

    def __enter__(self) -> Self:
        self._was_enabled = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        gc.unfreeze()
        if self._was_enabled:
            gc.enable()

    def collect_garbage_if_due(self, step: int) -> None:
        """Run the garbage collector if it is due after step `step` of the run. Called on all ranks at the same step."""
        self._steps_done += 1
        if self._steps_done == _FREEZE_AFTER_STEPS:
            gc.collect()
            gc.freeze()
        elif step % _INTERVAL_STEPS == 0:
            gc.collect()
