"""A rank that hangs says where it stands, and ends, so that its group starts anew.

Peers of a rank that hangs wait for it in a collective and lose their patience (guard.py); what they can tell is only that
somebody did not come. So each rank is watched from within: a thread counts how long a step has taken. It gives the rank
somewhat longer than its peers' patience, so that those who merely wait have left by then. When the agent then asks for
the rank (SIGTERM, which its main thread may be deaf to), it is the culprit who is left. Where nobody asks, all may be busy
with something rare, such as a compiler or a slow disk, and it gets several times as long.

Where its threads stand is written by faulthandler, which needs nothing of the interpreter. Its clock of its own is left
alone: a process that was forked while it ran would wait for it for ever.
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

from swarmtrain.board import Board
from swarmtrain.errors import BoardError
from swarmtrain.trainer.guard import patience
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.wire import FAILURE, Event, world_key

EVERY = 1.0
"""Seconds between two looks."""
MARGIN = 5.0
"""Seconds that a rank gets beyond its peers' patience."""
_ALONE = 4
"""How many times as long it gets if nobody asks for it."""
_STEPS = 3
_RECENT = 32


class Watchdog:
    """Watches the steps of this rank while it is entered."""

    def __init__(self, here: Runtime) -> None:
        self._here = here
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._number: int | None = None
        self._waited = 0.0
        self._asked = False
        self._ears, self._mouth, self._before = -1, -1, -1
        self._over = threading.Event()
        self._main = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._ears, self._mouth = os.pipe2(os.O_NONBLOCK)
        self._before = signal.set_wakeup_fd(self._mouth, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        signal.set_wakeup_fd(self._before)
        os.close(self._ears)
        os.close(self._mouth)

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Make step `number` in the body. What it raises bears the number: the same error at the same step again is a bug."""
        begun, self._waited, self._number = time.monotonic(), 0.0, number
        try:
            yield
        except Exception as error:
            with suppress(AttributeError):
                error.step = number  # type: ignore[attr-defined]  # read in entrypoint/rank.py
            raise
        finally:
            self._number = None
        self._recent.append(time.monotonic() - begun)

    @property
    def _limit(self) -> float | None:
        """Seconds that a step may take; None as long as nobody knows what one takes."""
        recent = sorted(self._recent)
        if len(recent) < _STEPS:
            return None
        median = recent[len(recent) // 2]
        return patience(median) + 1.5 * median + MARGIN

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._over.wait(EVERY):
            now = time.monotonic()
            # A process that was stopped, with its container or by hand, has missed one look, however long it was.
            self._waited += min(now - looked, 2 * EVERY)
            looked = now
            self._listen()
            limit, number = self._limit, self._number
            if limit is not None and number is not None and self._waited > (limit if self._asked else _ALONE * limit):
                self._end(number)

    def _listen(self) -> None:
        """Learn of signals from where the interpreter writes them at once, whatever the main thread is in."""
        with suppress(BlockingIOError):
            self._asked |= signal.SIGTERM in os.read(self._ears, 64)

    def _end(self, number: int) -> None:
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        times = self._waited / sorted(self._recent)[len(self._recent) // 2]
        error = (
            f"hangs in step {number}, for {self._waited:.0f} s, {times:,.0f} times as long as a step takes: it stands in {_place(frames)}"
        )
        sys.stderr.write(f"rank {self._here.rank} {error}\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(sys.__stderr__ or 2)
        self._tell(error, "".join(traceback.format_list(frames)))
        os._exit(1)

    def _tell(self, error: str, trace: str) -> None:
        here = self._here
        if here.board and "TORCHELASTIC_RUN_ID" in os.environ:
            place = {"node": here.node, "rank": here.rank, "local_rank": here.local_rank, "world": world_key(os.environ)}
            with suppress(BoardError):
                Board(here.board).post(Event(FAILURE, {**place, "error": error, "exit_code": 1, "traceback": trace}))


def _place(frames: traceback.StackSummary) -> str:
    last = frames[-1]
    return f"{last.name}, {os.path.basename(last.filename)} line {last.lineno}"  # noqa: PTH119  # no file is touched
