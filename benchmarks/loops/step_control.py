"""Step control of a training loop: run steps on request from a pipe, and report their CPU time, in seconds, to another pipe.

Imports only the standard library, since it also runs in the virtual environments of other tools.
"""

from __future__ import annotations

import os
import time

PIPES_VARIABLE = "BENCH_STEP_PIPES"
"""Environment variable with the file descriptors of two pipe ends: the read end for requests and the write end for answers."""


class StepControl:
    """Blocks a loop before each step that is not yet requested."""

    def __init__(self) -> None:
        reader, writer = (int(number) for number in os.environ[PIPES_VARIABLE].split())
        self._requests, self._answers = os.fdopen(reader), os.fdopen(writer, "w")
        self._steps_left, self._started_at = 0, 0.0

    def step(self) -> None:
        """Report the CPU seconds of a completed request, and wait until the next step is requested. Exit if the pipe is closed."""
        if self._steps_left == 0:
            if self._started_at:
                self._answers.write(f"{time.process_time() - self._started_at}\n")
                self._answers.flush()
            request_line = self._requests.readline()
            if not request_line:
                os._exit(0)
            self._steps_left, self._started_at = int(request_line), time.process_time()
        self._steps_left -= 1
