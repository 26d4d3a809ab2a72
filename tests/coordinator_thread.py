"""A coordinator that is served in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from swarmtrain.entrypoint.coordinator.server import CoordinatorServer
from swarmtrain.entrypoint.coordinator.state_machine import Coordinator
from swarmtrain.protocol import Event


class ServedCoordinator:
    """A coordinator, its server, its address, and the events that it has published. `host` is the address to listen at."""

    def __init__(self, key: bytes, host: str, port: int, events: list[Event]) -> None:
        self.events = events
        budget = {"max_restarts": 3, "max_restarts_per_hour": 20, "min_nodes": 1}
        coordinator = Coordinator(run="test", **budget, boot_id="b", clock=time.monotonic, publish_event=self.events.append)
        self.server = CoordinatorServer(coordinator, key)
        self.address = ""
        self._host, self._port = host, port
        self._is_listening = threading.Event()
        self._loop = asyncio.new_event_loop()

    def list_events(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    def call(self, function: Callable[[], object]) -> None:
        """Call `function` in the server's thread, and wait for it."""
        finished = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(), finished.set()))
        assert finished.wait(10)

    @contextmanager
    def serve(self) -> Iterator[ServedCoordinator]:
        """Context manager that serves the coordinator."""
        thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        thread.start()
        assert self._is_listening.wait(10)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        port = await self.server.listen(self._host, self._port)
        self.address = f"{self._host}:{port}"
        self._is_listening.set()
        while not self._stop.is_set():
            self.server.process_timeouts()
            await asyncio.sleep(0.02)
        self.server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)


@contextmanager
def serve_coordinator(
    key: bytes = b"", *, host: str = "127.0.0.1", port: int = 0, events: list[Event] | None = None
) -> Iterator[ServedCoordinator]:
    """Serve a coordinator, which appends its events to `events`."""
    with ServedCoordinator(key, host, port, [] if events is None else events).serve() as served:
        yield served
