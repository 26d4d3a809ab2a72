"""A supervisor that hangs is killed, so that its container ends and is started again.

Docker's own way is a healthcheck. Until its first one has passed, a container is no running task and has no DNS record,
so that its peers cannot find it; the first one comes after a whole interval, and each starts a process. Here a child of
the supervisor listens to its heartbeat instead, from the first second and at no cost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
from types import FrameType

from swarmtrain.process import die_with_parent_now

_EVERY = 5.0
_MISSED = 12
_BEAT = b"."


def guard(*, every: float = _EVERY, missed: int = _MISSED) -> None:
    """Beat every `every` seconds from here on; a child kills this process when so many beats in a row were `missed`.

    The beat comes from a signal, which Python handles in the main thread: it stops with that thread, whatever the others
    do. Call it before there are any. SIGALRM and the interval timer are taken.
    """
    ears, mouth = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        os.close(mouth)
        _listen(parent, ears, every, missed)
    os.close(ears)
    os.set_blocking(mouth, False)

    def beat(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(mouth, _BEAT)

    signal.signal(signal.SIGALRM, beat)
    # At the interpreter's end the signal means death again, and torch takes its time to leave.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_REAL, every, every)


def _listen(parent: int, ears: int, every: float, missed: int) -> None:
    """Never return. Silences are counted one by one: a machine that was suspended has missed one beat, however long it slept."""
    try:
        die_with_parent_now()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        silences = 0
        while silences < missed:
            if not select.select([ears], [], [], every * 1.5)[0]:
                silences += 1
            elif os.read(ears, 64):
                silences = 0
            else:
                os._exit(0)  # it has ended
        os.write(2, b"swarmtrain: the supervisor of this node hangs, and is killed\n")
        os.kill(parent, signal.SIGKILL)
    finally:
        os._exit(1)
