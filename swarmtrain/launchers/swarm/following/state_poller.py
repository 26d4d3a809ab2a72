"""Thread that polls the state of a run every second, so a hanging manager does not block the display of received updates."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service, Task

# A manager that does not answer for this many seconds is reported.
UNREACHABLE_AFTER_SECONDS = 5.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class SwarmSnapshot:
    """The result of one poll of the swarm."""

    services: list[Service]
    tasks: list[Task]
    hosts: dict[str, str]
    unavailable_hosts: Mapping[str, str] = field(default_factory=dict)


class StatePoller(threading.Thread):
    """Thread that polls the swarm until it is closed, and puts the result of each successful poll into `snapshots`."""

    def __init__(self, engine: DockerEngine, run: str) -> None:
        super().__init__(name=f"states of {run}", daemon=True)
        self._engine, self._run = engine, run
        self._hosts: dict[str, str] = {}
        self._closing = threading.Event()
        self.snapshots: queue.SimpleQueue[SwarmSnapshot] = queue.SimpleQueue()
        self.managers: list[str] = []
        self.last_error: EngineError | None = None
        """The error of the last poll; None if it succeeded."""

    def run(self) -> None:
        """Poll the swarm until the poller is closed."""
        while not self._closing.is_set():
            try:
                self.snapshots.put(self._take_snapshot())
                self.last_error = None
            except EngineError as error:
                self.last_error = error
            self._closing.wait(_POLL_SECONDS)

    def close(self) -> None:
        """Stop the thread after the poll in progress."""
        self._closing.set()

    def _take_snapshot(self) -> SwarmSnapshot:
        services = cluster_state.list_services(self._engine, self._run)
        tasks = cluster_state.list_tasks(self._engine, self._run)
        if not self._hosts or any(task.node_id not in self._hosts for task in tasks if task.node_id):
            self._hosts = cluster_state.read_host_names(self._engine)
            self.managers = cluster_state.list_managers(self._engine)
        return SwarmSnapshot(services, tasks, self._hosts, cluster_state.read_unavailable_hosts(self._engine, tasks))
