"""The stop flag, and patience with peers.

SIGTERM asks a rank to leave, and it leaves only when all ranks have agreed on the step. The handler must do nothing but
set a flag, since it runs between any two lines of the training loop. Ranks see the signal up to seconds apart, so the
flag goes into the sums that ranks exchange anyway (step.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from swarmtrain.trainer.runtime import set_patience
from swarmtrain.wire import ATTACHED

_STEPS = 3
_LEAST, _MOST = 10.0, 25.0
_A_DAY = 24 * 3600.0


class StopFlag:
    """While entered, SIGTERM raises it and does nothing else; so does Ctrl-C, the first time."""

    def __init__(self, asked: Callable[[], bool] = lambda: False) -> None:
        """`asked`: says whether this rank has been asked to leave in some other way. Called at each step."""
        self._asked, self._signalled = asked, False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._raise) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def raised(self) -> bool:
        """Whether this rank has been asked to leave."""
        return self._signalled or self._asked()

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])


def patience(step: float) -> float:
    """Return how many seconds to wait for a peer where a step takes `step`."""
    if ATTACHED in os.environ:
        return _A_DAY
    return min(max(_LEAST, 20 * step), max(_MOST, 5 * step))


class Patience:
    """How long a collective waits for a peer: half an hour at first, some steps' worth once it is known how long a step takes.

    A killed peer is noticed at once, a stopped one only when this runs out. It stays below the 30 s after which torchrun
    kills ranks that were asked to leave, since a rank that waits cannot see SIGTERM.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._steps: list[float] = []
        self._seconds: float | None = None

    def step_took(self, seconds: float) -> None:
        """Note the duration of a step; the third one settles the patience."""
        if self._seconds is None:
            self._steps.append(seconds)
            if len(self._steps) == _STEPS:
                median = sorted(self._steps)[_STEPS // 2]
                # Ranks may settle on different values: each waits for its own.
                self._seconds = patience(median)
                set_patience(self._seconds, self._groups)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Wait for peers without hurry in the body, in which one may write to a slow disk."""
        set_patience(None, self._groups)
        yield
        if self._seconds is not None:
            set_patience(self._seconds, self._groups)
