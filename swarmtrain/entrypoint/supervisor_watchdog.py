"""Watchdog of the supervisor: kills a supervisor that hangs, so that its container exits and is restarted.

Docker's healthcheck is not used. Until the first healthcheck has passed, a Swarm task is not running and has no DNS record, so its peers
cannot find it; the first healthcheck is run only after a full interval, and each one starts a process. Instead, a child process of the
supervisor watches the supervisor's heartbeat, from the first second and at almost no cost.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
from types import FrameType

from swarmtrain.process import set_parent_death_signal

_HEARTBEAT_SECONDS = 5.0
_MAX_MISSED_HEARTBEATS = 12
_HEARTBEAT_BYTE = b"."


def start_heartbeat_watchdog(*, interval: float = _HEARTBEAT_SECONDS, max_missed_heartbeats: int = _MAX_MISSED_HEARTBEATS) -> None:
    """Send a heartbeat every `interval` s to a child process, which kills this process after `max_missed_heartbeats` missed heartbeats.

    The heartbeat is sent from a signal handler, which Python runs in the main thread: heartbeats stop if the main thread hangs, even if
    other threads still run. Call this function before any thread is started. Uses SIGALRM and the interval timer ITIMER_REAL.
    """
    read_fd, write_fd = os.pipe()
    parent = os.getpid()
    if os.fork() == 0:
        os.close(write_fd)
        _watch_heartbeat(parent, read_fd, interval, max_missed_heartbeats)
    os.close(read_fd)
    os.set_blocking(write_fd, False)

    def send_heartbeat(signal_number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(OSError):  # the watchdog process has exited
            os.write(write_fd, _HEARTBEAT_BYTE)

    signal.signal(signal.SIGALRM, send_heartbeat)
    # During interpreter shutdown SIGALRM has its default action again, which would kill the process while torch shuts down.
    atexit.register(signal.setitimer, signal.ITIMER_REAL, 0)
    signal.setitimer(signal.ITIMER_REAL, interval, interval)


def _watch_heartbeat(parent_pid: int, read_fd: int, interval: float, max_missed_heartbeats: int) -> None:
    """Watch the heartbeat of the process `parent_pid` and kill it if it hangs; never returns.

    Missed heartbeats are counted, not the elapsed time: a suspend causes one missed heartbeat, however long the machine was suspended.
    """
    try:
        set_parent_death_signal()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        missed_heartbeats = 0
        while missed_heartbeats < max_missed_heartbeats:
            if not select.select([read_fd], [], [], interval * 1.5)[0]:
                missed_heartbeats += 1
            elif os.read(read_fd, 64):
                missed_heartbeats = 0
            else:
                os._exit(0)  # the parent has exited
        os.write(2, b"swarmtrain: the supervisor of this node hangs, and is killed\n")
        os.kill(parent_pid, signal.SIGKILL)
    finally:
        os._exit(1)
