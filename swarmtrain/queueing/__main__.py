"""The program of the scheduler's container: hold the scheduler's lock, and schedule until the process is stopped."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType

from swarmtrain import __version__
from swarmtrain.errors import SwarmtrainError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.queueing.queue_service import SOCKET_PATH, create_scheduler_lock
from swarmtrain.queueing.scheduler import LeadershipLost, Scheduler
from swarmtrain.queueing.swarm_events import watch_swarm


def main() -> int:
    """Schedule until SIGTERM. Return 1 if another process has become the scheduler, so that Swarm starts this one again."""
    signal.signal(signal.SIGTERM, _exit)
    _print_line(f"swarmtrain {__version__}: scheduler of the queue")
    wake = threading.Event()
    try:
        engine = DockerEngine(f"unix://{SOCKET_PATH}")
        lock = create_scheduler_lock(engine)
        with lock.hold_lock(_print_line):
            _print_line("scheduling")
            watch_swarm(engine, wake)
            Scheduler(engine, _print_line, check_leader=lock.check_lock_held).run_forever(wake)
    except (SwarmtrainError, LeadershipLost) as error:
        _print_line(str(error))
    return 1


def _exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _print_line(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} {text}", flush=True)  # noqa: T201  # the log of the scheduler's container


if __name__ == "__main__":
    sys.exit(main())
