"""Watchdog: a rank that hangs reports where it hangs, and exits, so that the run restarts.

The peers of a hanging rank wait in a collective until the collective times out (stop_flag.py). They can only report that some rank did not
arrive. So each rank also has a watchdog thread, which measures how long the current step has taken. The watchdog's step timeout is longer
than the collective timeout: by then, waiting ranks have exited, torchrun's agent has sent SIGTERM to the other ranks (a blocked main
thread may not handle it), and the remaining rank is the one that hangs. If no stop was requested, all ranks may be in a rare long
operation, such as a compilation or slow disk I/O, so the step timeout is several times as long.

faulthandler writes the stack traces, since it works even if the interpreter is blocked. Its own timer
(dump_traceback_later) is not used: a process that was forked while the timer ran would wait for it forever.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

from swarmtrain.errors import CoordinatorError
from swarmtrain.protocol import ENV_WORLD, EVENT_FAILURE, Event
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.trainer.health.stop_flag import compute_collective_timeout
from swarmtrain.trainer.runtime import Runtime

POLL_SECONDS = 1.0
"""Seconds between two checks of the current step."""
MARGIN_SECONDS = 5.0
"""Seconds by which the timeout of a step exceeds 1.5 times the usual step time plus the collective timeout of the other ranks."""
_UNREQUESTED_FACTOR = 4
"""Factor by which the timeout of a step is longer if no stop was requested."""
_MIN_STEPS = 3
_WINDOW_STEPS = 32


class Watchdog:
    """Context manager that writes stack traces and terminates the process if a step of this rank hangs."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._recent_step_seconds: deque[float] = deque(maxlen=_WINDOW_STEPS)
        self._current_step: int | None = None
        self._elapsed_seconds = 0.0
        self._stop_requested = False
        self._wakeup_read_fd, self._wakeup_write_fd, self._previous_wakeup_fd = -1, -1, -1
        self._stopped = threading.Event()
        self._main_thread_id = threading.get_ident()
        self._thread = threading.Thread(target=self._poll_steps, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._wakeup_read_fd, self._wakeup_write_fd = os.pipe2(os.O_NONBLOCK)
        self._previous_wakeup_fd = signal.set_wakeup_fd(self._wakeup_write_fd, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
        signal.set_wakeup_fd(self._previous_wakeup_fd)
        os.close(self._wakeup_read_fd)
        os.close(self._wakeup_write_fd)

    @contextmanager
    def watch_step(self, step: int) -> Iterator[None]:
        """Context manager that measures how long step `step`, its body, takes.

        Exceptions get the attribute `step`: an error that recurs at the same step after a restart is treated as a bug.
        """
        start_time, self._elapsed_seconds, self._current_step = time.monotonic(), 0.0, step
        try:
            yield
        except Exception as error:
            with suppress(AttributeError):
                error.step = step  # type: ignore[attr-defined]  # read in entrypoint/supervisor/rank_process.py
            raise
        finally:
            self._current_step = None
        self._recent_step_seconds.append(time.monotonic() - start_time)

    @property
    def _step_timeout_seconds(self) -> float | None:
        """Timeout of a step in seconds, if a stop was requested; None until the usual step time is known."""
        recent = sorted(self._recent_step_seconds)
        if len(recent) < _MIN_STEPS:
            return None
        median = recent[len(recent) // 2]
        return compute_collective_timeout(median) + 1.5 * median + MARGIN_SECONDS

    def _poll_steps(self) -> None:
        last_poll = time.monotonic()
        while not self._stopped.wait(POLL_SECONDS):
            now = time.monotonic()
            # A frozen process (docker pause, SIGSTOP) misses only one check, regardless of the duration.
            self._elapsed_seconds += min(now - last_poll, 2 * POLL_SECONDS)
            last_poll = now
            self._read_signals()
            limit, number = self._step_timeout_seconds, self._current_step
            if (
                limit is not None
                and number is not None
                and self._elapsed_seconds > (limit if self._stop_requested else _UNREQUESTED_FACTOR * limit)
            ):
                self._terminate_hung_rank(number)

    def _read_signals(self) -> None:
        """Read pending signals from the wakeup file descriptor, to which the interpreter writes them even if the main thread is blocked."""
        with suppress(BlockingIOError):
            self._stop_requested |= signal.SIGTERM in os.read(self._wakeup_read_fd, 64)

    def _terminate_hung_rank(self, step: int) -> None:
        frames = traceback.extract_stack(sys._current_frames()[self._main_thread_id])
        slowdown = self._elapsed_seconds / sorted(self._recent_step_seconds)[len(self._recent_step_seconds) // 2]
        error = (
            f"hangs in step {step}, for {self._elapsed_seconds:.0f} s, {slowdown:,.0f}× "
            f"the usual step time, in {_format_code_location(frames)}"
        )
        sys.stderr.write(f"rank {self._runtime.rank} {error}\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._post_failure(error, "".join(traceback.format_list(frames)))
        os._exit(1)

    def _post_failure(self, error: str, traceback_text: str) -> None:
        runtime = self._runtime
        if runtime.coordinator_address and ENV_WORLD in os.environ:
            rank_fields = {
                "node": runtime.node,
                "rank": runtime.rank,
                "local_rank": runtime.local_rank,
                "world": os.environ[ENV_WORLD],
            }
            with suppress(CoordinatorError):
                CoordinatorClient(runtime.coordinator_address).post_event(
                    Event(EVENT_FAILURE, {**rank_fields, "error": error, "exit_code": 1, "traceback": traceback_text})
                )


def _format_code_location(frames: traceback.StackSummary) -> str:
    frame = frames[-1]
    return f"{frame.name}, {os.path.basename(frame.filename)} line {frame.lineno}"  # noqa: PTH119  # no file is accessed
