"""Benchmark of a supervisor's heartbeat: a request to the coordinator over loopback, signed with the run's key, against an unsigned one."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.measurement import BenchmarkRow, measure_in_turns
from swarmtrain.coordinator_client import CoordinatorClient
from swarmtrain.entrypoint.coordinator.server import CoordinatorServer
from swarmtrain.entrypoint.coordinator.state_machine import Coordinator
from swarmtrain.run_key import create_run_key

_REPEATS = 15
_HEARTBEATS = 400


def measure_signed_heartbeats() -> Iterator[BenchmarkRow]:
    """Measure the median duration, in milliseconds, of a heartbeat with and without a signature."""
    key = create_run_key()
    with _serve_coordinator(key) as signed, _serve_coordinator(b"") as unsigned:
        result, baseline = measure_in_turns(_REPEATS, lambda: _measure_heartbeat(signed), lambda: _measure_heartbeat(unsigned))
    description = "heartbeat of a supervisor over loopback, signed with the run's key"
    yield BenchmarkRow("heartbeat", description, "ms", result, baseline, "an unsigned heartbeat", limit=baseline.median * 1.2)


def _measure_heartbeat(client: CoordinatorClient) -> float:
    durations = []
    for _ in range(_HEARTBEATS):
        started_at = time.perf_counter()
        client.send_heartbeat("node0")
        durations.append(time.perf_counter() - started_at)
    return statistics.median(durations) * 1e3


@contextmanager
def _serve_coordinator(key: bytes) -> Iterator[CoordinatorClient]:
    budget = {"max_restarts": 1, "max_restarts_per_hour": 1, "min_nodes": 1}
    coordinator = Coordinator(run="bench", boot_id="bench", run_id="", **budget, clock=time.monotonic, publish_event=lambda event: None)
    with CoordinatorServer(("127.0.0.1", 0), coordinator, key) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield CoordinatorClient(f"127.0.0.1:{server.server_address[1]}", key=key)
        server.shutdown()
        thread.join()
