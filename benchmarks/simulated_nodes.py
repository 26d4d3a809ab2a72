"""Benchmark of the coordinator with 1,000 nodes of 8 ranks, which coroutines simulate: a join, a loss of 10 nodes, and a rescue.

The coordinator is a real process. Each simulated node sends the requests of a supervisor, an agent and ranks, signed with the run's key,
from a loopback address of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.measurement import BenchmarkRow, Sample, print_progress
from swarmtrain.process import raise_open_file_limit, start_process
from swarmtrain.protocol import (
    ENV_KEY_FILE,
    EVENT_FAILURE,
    EVENT_NODE_JOINED,
    EVENT_WORLD_FORMED,
    PROTOCOL_VERSION,
    CoordinatorEnv,
    SurvivorState,
    WorldRequest,
)
from swarmtrain.protocol.run_key import (
    MAX_FIRST_REQUEST_BYTES,
    NEXT_NONCE_FIELD,
    REQUEST_PURPOSE,
    RESPONSE_PURPOSE,
    build_signed_message,
    create_run_key,
    open_signed_message,
)

_NODES = int(os.environ.get("SWARMTRAIN_SIMULATED_NODES", "1000"))
_SLOTS = 8
_LOST_NODES = 10
_REPEATS = 3
_MAX_JOIN_SECONDS = 10.0
_REPORT_SECONDS = 0.2  # the interval of trainer.checkpoint.just_in_time


def measure_simulated_nodes() -> Iterator[BenchmarkRow]:
    """Measure the seconds until all nodes are in a world, in the next one without the lost nodes, and have heard of the end of a rescue."""
    raise_open_file_limit()
    durations: dict[str, list[float]] = {"join": [], "loss": [], "rescue": []}
    for repeat in range(_REPEATS):
        with _start_coordinator() as (port, key):
            for name, seconds in asyncio.run(_simulate_run(port, key)).items():
                durations[name].append(seconds)
        print_progress(f"run {repeat + 1} of {_REPEATS}: " + ", ".join(f"{name} {values[-1]:.1f} s" for name, values in durations.items()))
    descriptions = {
        "join": (f"join of {_NODES:,} × {_SLOTS} simulated ranks, to a world", _MAX_JOIN_SECONDS),
        "rescue": (f"a rescue of {(_NODES - _LOST_NODES) * _SLOTS:,} ranks, until all have heard that it is finished", None),
        "loss": (f"{_LOST_NODES} of {_NODES:,} nodes are lost, to the world of the others", None),
    }
    for name, (description, limit) in descriptions.items():
        yield BenchmarkRow(f"nodes-1000/{name}", description, "s", Sample.from_values(durations[name]), limit=limit)


@contextmanager
def _start_coordinator() -> Iterator[tuple[int, bytes]]:
    """Start a coordinator with a key, and yield its port and the key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    key = create_run_key()
    with tempfile.TemporaryDirectory() as folder:
        key_file = Path(folder) / "key"
        key_file.write_bytes(key)
        env = CoordinatorEnv("bench", port, "127.0.0.1", 99, 99, min_nodes=1, key_file=str(key_file)).to_env() | {
            ENV_KEY_FILE: str(key_file)
        }
        argv = [sys.executable, "-m", "swarmtrain.entrypoint", "rendezvous"]
        process = start_process(argv, env=env, stdout=subprocess.DEVNULL, die_with_parent=True)
        try:
            yield port, key
        finally:
            process.kill()
            process.wait()


async def _simulate_run(port: int, key: bytes) -> dict[str, float]:
    nodes = [_SimulatedNode(number, port, key) for number in range(_NODES)]
    await nodes[0].wait_until_reachable()
    started_at = time.monotonic()
    await asyncio.gather(*(node.join() for node in nodes))
    joined_at = time.monotonic()
    heartbeats = [asyncio.create_task(node.send_heartbeats()) for node in nodes[_LOST_NODES:]]
    watches = [asyncio.create_task(node.wait_until_world_is_over()) for node in nodes[_LOST_NODES:]]
    surviving_nodes = nodes[_LOST_NODES:]
    lost_at = time.monotonic()
    await asyncio.gather(*(node.report_lost_peer() for node in surviving_nodes), *watches)
    rescue_at = time.monotonic()
    await asyncio.gather(*(node.take_part_in_rescue(rank) for node in surviving_nodes for rank in range(_SLOTS)))
    rescued_at = time.monotonic()
    await asyncio.gather(*(node.enter_next_world() for node in surviving_nodes))
    ended_at = time.monotonic()
    for task in heartbeats:
        task.cancel()
    return {"join": joined_at - started_at, "loss": ended_at - lost_at - (rescued_at - rescue_at), "rescue": rescued_at - rescue_at}


class _SimulatedNode:
    """The requests of a node's supervisor, agent and ranks."""

    def __init__(self, number: int, port: int, key: bytes) -> None:
        self.name, self.world, self.first_rank = f"node{number}", "", number * _SLOTS
        self._address = f"127.1.{number // 250}.{number % 250 + 1}"
        self._port, self._key, self._nonces = port, key, [""]
        self._round = ""

    async def wait_until_reachable(self) -> None:
        while True:
            try:
                await self._send_request("ping")
                return
            except OSError:
                await asyncio.sleep(0.1)

    async def join(self) -> None:
        await self._post(EVENT_NODE_JOINED, node=self.name, address=self._address, host="h", interface="lo", slots=_SLOTS)
        await self._send_request("join", node=self.name)
        self._round = (await self._send_request("close", node=self.name, round=""))["round"]
        heartbeats = asyncio.create_task(self.send_heartbeats())
        await self.enter_next_world()
        heartbeats.cancel()

    async def enter_next_world(self) -> None:
        request = WorldRequest(self.name, self.name, self._round, self.world, _SLOTS, self._address, 4000, min_nodes=1, max_nodes=_NODES)
        while not (assignment := await self._send_request("request_world", **asdict(request)))["world"]:
            pass
        self.world, self.first_rank, count = assignment["world"], assignment["group_rank"] * _SLOTS, assignment["node_count"]
        ranks = list(range(self.first_rank, self.first_rank + _SLOTS))
        await self._post(EVENT_WORLD_FORMED, world=self.world, world_size=count * _SLOTS, nodes=count, ranks={self.name: ranks})

    async def send_heartbeats(self) -> None:
        while True:
            await self._send_request("beat", node=self.name)
            await asyncio.sleep(1.0)

    async def wait_until_world_is_over(self) -> None:
        while not (await self._send_request("is_world_over", world=self.world))["is_over"]:
            pass

    async def report_lost_peer(self) -> None:
        error = "RuntimeError: Connection closed by peer [10.0.0.3]:4711"
        for rank in range(self.first_rank, self.first_rank + _SLOTS):
            await self._post(EVENT_FAILURE, node=self.name, rank=rank, local_rank=rank % _SLOTS, world=self.world, error=error, exit_code=1)

    async def take_part_in_rescue(self, local_rank: int) -> None:
        """Report the state of a rank until the rescue is finished; the first writer finishes it."""
        rank = self.first_rank + local_rank
        state = asdict(SurvivorState(step=100, ready=False, shard=0, shards=1, world_size=_NODES * _SLOTS))
        world = f"{self.world}/rescue"  # a world in which no rank has reported a failure
        while True:
            with suppress(OSError):  # a rank repeats its report
                rescue = await self._send_request("report_surviving_rank", world=world, rank=rank, state=state)
                if rescue["is_finished"]:
                    return
                if rank in rescue["writers"]:
                    await self._send_request("rescue_finished", world=world, attempt=rescue["attempt"], rank=rank)
            await asyncio.sleep(_REPORT_SECONDS)

    async def _post(self, kind: str, **data: Any) -> None:
        await self._send_request("post", kind=kind, data=data)

    async def _send_request(self, op: str, **fields: Any) -> dict[str, Any]:
        """Send a request as swarmtrain.protocol.coordinator_client does, and return the response."""
        body = json.dumps({"op": op, "protocol": PROTOCOL_VERSION, **fields})
        nonce = self._nonces.pop() if self._nonces else ""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, local_addr=(self._address, 0), limit=1 << 20)
        try:
            line = build_signed_message(self._key, REQUEST_PURPOSE, nonce, body)
            if not nonce or len(line) > MAX_FIRST_REQUEST_BYTES:
                line = build_signed_message(self._key, REQUEST_PURPOSE, "", "")
            writer.write(line)
            line = await reader.readline()
            if line.startswith(b"{"):
                writer.write(build_signed_message(self._key, REQUEST_PURPOSE, json.loads(line)["nonce"], body))
                line = await reader.readline()
        finally:
            writer.close()
        message = open_signed_message(self._key, RESPONSE_PURPOSE, line)
        if message is None:
            raise ConnectionError(f"no signed response: {line!r}")
        response: dict[str, Any] = json.loads(message.body)
        self._nonces.append(response.pop(NEXT_NONCE_FIELD))
        if "error" in response:
            raise ConnectionError(response["error"])
        return response
