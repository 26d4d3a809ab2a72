"""A loop's side of the pipe: it goes on when it is told to, and tells how long its steps took, in seconds of CPU.

Standard library only, since it runs in other people's environments too.
"""

from __future__ import annotations

import os
import time

VARIABLE = "BENCH_PACE"
"""The environment's name for the two ends of pipes, one to read and one to write."""


class Pace:
    """Stops a loop before a step until it is told how many to take."""

    def __init__(self) -> None:
        reader, writer = (int(number) for number in os.environ[VARIABLE].split())
        self._orders, self._answers = os.fdopen(reader), os.fdopen(writer, "w")
        self._left, self._begun = 0, 0.0

    def step(self) -> None:
        """A step begins, and those before it are done. The process ends here when nobody wants more of them."""
        if self._left == 0:
            if self._begun:
                self._answers.write(f"{time.process_time() - self._begun}\n")
                self._answers.flush()
            order = self._orders.readline()
            if not order:
                os._exit(0)
            self._left, self._begun = int(order), time.process_time()
        self._left -= 1
