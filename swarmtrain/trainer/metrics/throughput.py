"""Throughput in tokens per second, and estimated remaining time."""

from __future__ import annotations

import time
from collections import deque

_WINDOW_STEPS = 50


class Throughput:
    """Measures throughput, in tokens/s, as a moving average over the last 50 steps.

    The time for validation and checkpoints between steps is included.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=_WINDOW_STEPS + 1)

    def record_step(self, tokens: int) -> None:
        """Record that a step with `tokens` loss tokens has ended."""
        self._marks.append((time.monotonic(), self._marks[-1][1] + tokens))

    @property
    def tokens_per_second(self) -> float:
        """Loss tokens per second, summed over all ranks."""
        return (self._marks[-1][1] - self._marks[0][1]) / self._elapsed_seconds

    def estimate_seconds_left(self, steps_left: int) -> float:
        """Return the estimated time in seconds for the `steps_left` remaining steps."""
        return steps_left * self._elapsed_seconds / max(1, len(self._marks) - 1)

    @property
    def _elapsed_seconds(self) -> float:
        return max(1e-9, self._marks[-1][0] - self._marks[0][0])
