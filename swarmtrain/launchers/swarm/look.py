"""How a run stands, looked at every second by a thread: a manager that hangs must not hold back what is known already."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

from swarmtrain.errors import EngineError
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe
from swarmtrain.launchers.swarm.observe import Service, Task

# A manager that does not answer for so many seconds is told of.
SILENCE = 5.0
_POLL = 1.0


@dataclass(frozen=True)
class Seen:
    """One look at the swarm."""

    services: list[Service]
    tasks: list[Task]
    hosts: dict[str, str]


class Looker(threading.Thread):
    """Looks until it is closed. What it sees is in `seen`."""

    def __init__(self, engine: Engine, run: str) -> None:
        super().__init__(name=f"states of {run}", daemon=True)
        self._engine, self._run = engine, run
        self._hosts: dict[str, str] = {}
        self._closing = threading.Event()
        self.seen: queue.SimpleQueue[Seen] = queue.SimpleQueue()
        self.managers: list[str] = []
        self.error: EngineError | None = None
        """Why the last look failed."""

    def run(self) -> None:
        """Look, and look again."""
        while not self._closing.is_set():
            try:
                self.seen.put(self._look())
                self.error = None
            except EngineError as error:
                self.error = error
            self._closing.wait(_POLL)

    def close(self) -> None:
        """End the thread after its next look."""
        self._closing.set()

    def _look(self) -> Seen:
        services = observe.services(self._engine, self._run)
        found = observe.tasks(self._engine, self._run)
        if not self._hosts or any(task.node not in self._hosts for task in found if task.node):
            self._hosts = observe.hosts(self._engine)
            self.managers = observe.managers(self._engine)
        return Seen(services, found, self._hosts)
