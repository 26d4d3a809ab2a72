"""Python's garbage collector, held until all ranks run it together.

Left to itself it starts at any moment, at another one on each rank, and reads all that imports have brought: a rank that
collects lets all others wait at the next exchange. So it is off during steps. What is there after the first ones is set
aside for good, and what came since is looked through at an interval of steps, by all ranks at the same one.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

_FIRST = 2
"""Steps after which all is there that stays."""
_INTERVAL = 50


class Collector:
    """While entered, garbage is collected only in `after_step`."""

    def __init__(self) -> None:
        self._made = 0
        self._before = True

    def __enter__(self) -> Self:
        self._before = gc.isenabled()
        gc.disable()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        gc.unfreeze()
        if self._before:
            gc.enable()

    def after_step(self, number: int) -> None:
        """Step `number` of the run is done. Called by all ranks together."""
        self._made += 1
        if self._made == _FIRST:
            gc.collect()
            gc.freeze()
        elif number % _INTERVAL == 0:
            gc.collect()
