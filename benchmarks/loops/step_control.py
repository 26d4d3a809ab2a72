"""A loop's side of the pipes: it takes steps on request and reports how long they took, in seconds of CPU.

Standard library only, since it also runs in the environments of other tools.
"""

from __future__ import annotations

import os
import time

PIPES_VARIABLE = "BENCH_STEP_PIPES"
"""The environment variable with the file descriptors of two pipe ends, one to read from and one to write to."""


class StepControl:
    """Blocks a loop before a step until a number of steps is requested."""

    def __init__(self) -> None:
        reader, writer = (int(number) for number in os.environ[PIPES_VARIABLE].split())
        self._requests, self._answers = os.fdopen(reader), os.fdopen(writer, "w")
        self._steps_left, self._started_at = 0, 0.0

    def step(self) -> None:
        """Begin a step, after those before it are done. The process exits here when no more steps are requested."""
        if self._steps_left == 0:
            if self._started_at:
                self._answers.write(f"{time.process_time() - self._started_at}\n")
                self._answers.flush()
            request_line = self._requests.readline()
            if not request_line:
                os._exit(0)
            self._steps_left, self._started_at = int(request_line), time.process_time()
        self._steps_left -= 1
