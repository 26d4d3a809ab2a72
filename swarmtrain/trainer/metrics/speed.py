"""Tokens per second and time to go."""

from __future__ import annotations

import time
from collections import deque

_WINDOW = 50


class Speed:
    """Measures over the last steps, evaluations and checkpoints between them included."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=_WINDOW + 1)

    def step(self, tokens: int) -> None:
        """Note that a step with `tokens` tokens is done."""
        self._marks.append((time.monotonic(), self._marks[-1][1] + tokens))

    @property
    def tokens_per_second(self) -> float:
        """Tokens in a second, all ranks together."""
        return (self._marks[-1][1] - self._marks[0][1]) / self._seconds

    def eta(self, steps_left: int) -> float:
        """Seconds that `steps_left` steps will take."""
        return steps_left * self._seconds / max(1, len(self._marks) - 1)

    @property
    def _seconds(self) -> float:
        return max(1e-9, self._marks[-1][0] - self._marks[0][0])
