"""Benchmark of the ranks' store of a run with a key, which agents relay: 16 ranks create process groups, against a bare TCPStore.

The ranks are processes of this machine, as on two nodes of eight. Half of them reach the store through two relays, the others through one.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from benchmarks.measurement import BenchmarkRow, measure_in_turns
from swarmtrain.protocol.distributed_env import LOOPBACK
from swarmtrain.protocol.run_key import create_run_key

_RANKS, _GROUPS = 16, 10
_REPEATS = 7
_GOAL_RATIO = 1.5
_WORLD = "bench/1"


def measure_rank_store() -> Iterator[BenchmarkRow]:
    """Measure the seconds from the start of `init_process_group` until the slowest rank has ten more groups."""
    from swarmtrain.entrypoint.rank_store import RankStore

    key = create_run_key()
    leader, other = RankStore(key, LOOPBACK), RankStore(key, LOOPBACK)

    def open_relayed_store() -> tuple[int, int]:
        return leader.serve_world(_WORLD), other.join_world(_WORLD, LOOPBACK, leader.port)

    relayed, bare = measure_in_turns(
        _REPEATS, lambda: _measure_groups(open_relayed_store, agent_store=True), lambda: _measure_groups(_choose_port, agent_store=False)
    )
    description = f"process group of {_RANKS} ranks and {_GROUPS} more over gloo, in a run with a key"
    yield BenchmarkRow("rank-store", description, "s", relayed, bare, "a bare TCPStore", goal=_GOAL_RATIO)


def _choose_port() -> tuple[int, int]:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port = int(probe.getsockname()[1])
    return port, port


def _measure_groups(open_store: Callable[[], tuple[int, int]], *, agent_store: bool) -> float:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    barrier, durations = context.Barrier(_RANKS), context.Queue()
    ports = open_store()
    ranks: list[BaseProcess] = [
        context.Process(target=_run_rank, args=(rank, ports[rank % 2], agent_store, barrier, durations)) for rank in range(_RANKS)
    ]
    for rank in ranks:
        rank.start()
    slowest: float = max(durations.get() for _ in ranks)
    for rank in ranks:
        rank.join()
    return slowest


def _run_rank(rank: int, port: int, agent_store: bool, barrier: Barrier, durations: Queue[float]) -> None:
    import torch.distributed as dist

    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(_RANKS),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": str(agent_store),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    barrier.wait()
    started_at = time.monotonic()
    dist.init_process_group("gloo")
    for _ in range(_GROUPS):
        dist.new_group(list(range(_RANKS)))
    durations.put(time.monotonic() - started_at)
    dist.barrier()
    durations.close()
    durations.join_thread()
    os._exit(0)  # without the destructors of torch's groups, which wait for each other
