"""Stop flag (graceful exit at SIGTERM), and timeout of collectives.

SIGTERM requests a stop of one rank, which exits only after all ranks have agreed on the last step. The signal handler only sets a flag,
since it may run between any two lines of the training loop. Ranks receive the signal up to several seconds apart, so the flag is included
in an all-reduce that each step runs anyway (step.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

import torch.distributed as dist

from swarmtrain.protocol import ENV_ATTACHED
from swarmtrain.trainer.runtime import set_collective_timeout

_MEASURED_STEPS = 3
_MIN_SECONDS, _MAX_SECONDS = 10.0, 25.0
_DEBUGGER_SECONDS = 24 * 3600.0


class StopFlag:
    """Context manager in which SIGTERM, or the first Ctrl-C, sets a flag instead of ending the process."""

    def __init__(self, is_externally_requested: Callable[[], bool] = lambda: False) -> None:
        """Create the flag. `is_externally_requested` is called at each step: it returns whether a stop was requested without a signal."""
        self._is_externally_requested, self._signal_received = is_externally_requested, False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._previous_handlers = {number: signal.signal(number, self._handle_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    @property
    def is_set(self) -> bool:
        """True if a stop of this rank was requested."""
        return self._signal_received or self._is_externally_requested()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal_received = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._previous_handlers[signal.SIGINT])


def compute_collective_timeout(step_seconds: float) -> float:
    """Return the timeout of collectives in seconds, if a step takes `step_seconds`."""
    if ENV_ATTACHED in os.environ:
        return _DEBUGGER_SECONDS
    return min(max(_MIN_SECONDS, 20 * step_seconds), max(_MAX_SECONDS, 5 * step_seconds))


class CollectiveTimeout:
    """Timeout of collectives: 30 min at first, a multiple of the step time once the step time is known.

    If a peer is killed, collectives fail at once; if it is frozen, only this timeout detects it. A rank that waits in a collective cannot
    handle SIGTERM, so for usual step times the timeout is below 30 s, after which torchrun kills ranks that it has sent SIGTERM.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self._groups = groups
        self._step_seconds: list[float] = []
        self._timeout_seconds: float | None = None

    def record_step_time(self, seconds: float) -> None:
        """Record that a step took `seconds`. The median of the first three steps sets the timeout."""
        if self._timeout_seconds is None:
            self._step_seconds.append(seconds)
            if len(self._step_seconds) == _MEASURED_STEPS:
                median = sorted(self._step_seconds)[_MEASURED_STEPS // 2]
                # Ranks may compute different timeouts; each uses its own.
                self._timeout_seconds = compute_collective_timeout(median)
                set_collective_timeout(self._timeout_seconds, self._groups)

    @contextmanager
    def use_initial_timeout(self) -> Iterator[None]:
        """Context manager that uses the initial timeout (30 min) in its body, for code that may write to a slow disk."""
        set_collective_timeout(None, self._groups)
        yield
        if self._timeout_seconds is not None:
            set_collective_timeout(self._timeout_seconds, self._groups)
