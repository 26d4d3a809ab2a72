"""Benchmark of a supervisor's heartbeat, a request to the coordinator over loopback: signed with the run's key, against an unsigned one.

Another row has the share of the signatures themselves. The rest is what a key adds to the protocol, and the first use of code in each
thread of the server.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from benchmarks.measurement import BenchmarkRow, Sample, measure_in_turns
from swarmtrain.entrypoint.coordinator.server import CoordinatorServer
from swarmtrain.entrypoint.coordinator.state_machine import Coordinator
from swarmtrain.protocol import PROTOCOL_VERSION, SupervisorResponse
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol.run_key import (
    NEXT_NONCE_FIELD,
    REQUEST_PURPOSE,
    RESPONSE_PURPOSE,
    build_signed_message,
    create_run_key,
    open_signed_message,
)

_REPEATS = 15
_HEARTBEATS = 400
_MAX_SIGNATURE_SHARE = 0.05


def measure_signed_heartbeats() -> Iterator[BenchmarkRow]:
    """Measure the median duration, in milliseconds, of a heartbeat with and without a signature."""
    key = create_run_key()
    with _serve_coordinator(key) as signed, _serve_coordinator(b"") as unsigned:
        result, baseline = measure_in_turns(_REPEATS, lambda: _measure_heartbeat(signed), lambda: _measure_heartbeat(unsigned))
    description = "heartbeat of a supervisor over loopback, signed with the run's key"
    yield BenchmarkRow("heartbeat", description, "ms", result, baseline, "an unsigned heartbeat", limit=baseline.median * 1.2)
    signatures = Sample.from_values([_measure_signatures(key) for _ in range(_REPEATS)])
    description = "signatures of a heartbeat and of its response: computed, and checked by the receiver"
    limit = result.median * _MAX_SIGNATURE_SHARE
    yield BenchmarkRow("heartbeat/signatures", description, "ms", signatures, result, "the signed heartbeat", limit=limit)


def _measure_heartbeat(client: CoordinatorClient) -> float:
    durations = []
    for _ in range(_HEARTBEATS):
        started_at = time.perf_counter()
        client.send_heartbeat("node0")
        durations.append(time.perf_counter() - started_at)
    return statistics.median(durations) * 1e3


def _measure_signatures(key: bytes) -> float:
    nonce, request = "0" * 32 + "-1234", json.dumps({"op": "beat", "protocol": PROTOCOL_VERSION, "node": "node0"})
    response = json.dumps({**asdict(SupervisorResponse("")), NEXT_NONCE_FIELD: nonce})
    started_at = time.perf_counter()
    for _ in range(_HEARTBEATS):
        open_signed_message(key, REQUEST_PURPOSE, build_signed_message(key, REQUEST_PURPOSE, nonce, request))
        open_signed_message(key, RESPONSE_PURPOSE, build_signed_message(key, RESPONSE_PURPOSE, nonce, response))
    return (time.perf_counter() - started_at) / _HEARTBEATS * 1e3


@contextmanager
def _serve_coordinator(key: bytes) -> Iterator[CoordinatorClient]:
    coordinator = Coordinator(
        run="bench",
        boot_id="bench",
        max_restarts=1,
        max_restarts_per_hour=1,
        min_nodes=1,
        clock=time.monotonic,
        publish_event=lambda event: None,
    )
    loop, server = asyncio.new_event_loop(), CoordinatorServer(coordinator, key)
    port = loop.run_until_complete(server.listen("127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield CoordinatorClient(f"127.0.0.1:{port}", key=key)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    server.close()
    loop.close()
