"""Wake the scheduler when something about the services or nodes of the swarm changes."""

from __future__ import annotations

import threading
import time

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine

_RETRY_SECONDS = 5.0


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
