"""The program of the scheduler's container: hold the scheduler's lock, and schedule until the process is stopped."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType

from swarmtrain import __version__
from swarmtrain.errors import EngineError, SwarmtrainError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.queueing.queue_service import SOCKET_PATH, create_scheduler_lock
from swarmtrain.queueing.scheduler import LeadershipLost, Scheduler

_RETRY_SECONDS = 5.0


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


def watch_swarm(engine: DockerEngine, wake: threading.Event) -> None:
    """Start a thread that sets `wake` at each event about a service or a node of the swarm.

    Swarm reports no events about tasks: the scheduler polls while it expects containers to start or end.
    """
    threading.Thread(target=_watch_forever, args=(engine, wake), name="swarm events", daemon=True).start()


def _watch_forever(engine: DockerEngine, wake: threading.Event) -> None:
    while True:
        try:
            for _ in engine.stream_events("service", "node"):
                wake.set()
        except EngineError:
            pass  # the scheduler's own requests report it
        wake.set()  # something may have happened in between
        time.sleep(_RETRY_SECONDS)


def _exit(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def _print_line(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} {text}", flush=True)  # noqa: T201  # the log of the scheduler's container


if __name__ == "__main__":
    sys.exit(main())
