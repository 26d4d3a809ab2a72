"""Probe of the first collective: import torch, connect all nodes, and run an all-reduce.

One process per node. It prints a line when torch is imported, then reads one JSON line from standard input: variables to add to its
environment, and link errors of this node. It then prints one JSON line: versions, devices, and for each backend the durations
of all-reduces in seconds, or an error. If any node has a link error, none runs the all-reduce: it would only hang.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import statistics
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from swarmtrain.entrypoint.network_interface import choose_route
from swarmtrain.errors import EXIT_OK
from swarmtrain.protocol import NodeEnv, ProbeEnv
from swarmtrain.protocol.distributed_env import LOOPBACK
from swarmtrain.protocol.run_key import load_run_key

if TYPE_CHECKING:
    from torch.distributed import Store

_SOURCE_LOCATION_PATTERN = re.compile(r"^\[\S+\] ")  # prefix of torch's error messages that names a source line
_ELEMENT_COUNT = 1 << 20
_REPETITIONS = 5
_MAX_ELEMENT_COUNT, _LARGE_SECONDS, _LARGE_REPETITIONS = 1 << 24, 0.5, 3
"""A second, larger all-reduce shows the bandwidth without the latency: as large as takes about this long."""
_GROUP_TIMEOUT = timedelta(seconds=40)
_STORE_NAME = "collective probe"


def main() -> NoReturn:
    """Import torch, wait for the request, print the result, and exit with 0.

    Exits by os._exit: a regular shutdown of torch takes 0.5 s of CPU time.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    request = json.loads(sys.stdin.readline())
    os.environ.update(request["environment"])
    sys.stdout.write(json.dumps(_probe_collective(request["broken"])) + "\n")
    sys.stdout.flush()
    os._exit(EXIT_OK)


def _probe_collective(link_errors: str) -> dict[str, Any]:
    try:
        import torch

        from swarmtrain.entrypoint.coordinator_store import CoordinatorStore
    except ImportError as error:
        return {"error": str(error)}
    env, probe_env = NodeEnv.from_env(os.environ), ProbeEnv.from_env(os.environ)
    report: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
    rank, world_size = probe_env.peers.index(env.node), len(probe_env.peers)
    try:
        coordinator_store = CoordinatorStore(env.coordinator, _STORE_NAME, _GROUP_TIMEOUT)
        if first_error := _exchange_link_errors(coordinator_store, rank, world_size, link_errors):
            return {**report, "error": f"skipped, because {first_error}"}
        store = _connect_rank_store(coordinator_store, env, is_server=rank == 0)
        report["gloo"] = _measure_backend("gloo", store, rank, world_size)
        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            report["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # not typed in torch
            report["nccl"] = _measure_backend("nccl", store, rank, world_size)
    except (RuntimeError, OSError) as error:
        return {**report, "error": _SOURCE_LOCATION_PATTERN.sub("", str(error).splitlines()[0])}
    return report


def _exchange_link_errors(store: Store, rank: int, world_size: int, link_errors: str) -> str:
    """Exchange the link errors through `store`, and return those of the first rank that has any, the same on all ranks.

    Raises RuntimeError if the store fails.
    """
    store.set(f"broken/{rank}", link_errors)
    all_errors = [store.get(f"broken/{peer_rank}").decode() for peer_rank in range(world_size)]
    return next(filter(None, all_errors), "")


def _connect_rank_store(coordinator_store: Store, env: NodeEnv, *, is_server: bool) -> Store:
    """Return the store of the process groups. As in training, rank 0 serves it, and the others find its address through the coordinator.

    Raises RuntimeError or OSError.
    """
    from torch.distributed import TCPStore

    address = choose_route(env.interface, env.coordinator).address
    if key := load_run_key():
        from swarmtrain.entrypoint.rank_store import RankStore

        rank_store = RankStore(key, address)
        if is_server:
            coordinator_store.set("address", f"{address}:{rank_store.port}")
            port = rank_store.serve_world(_STORE_NAME)
        else:
            port = rank_store.join_world(_STORE_NAME, *_read_address(coordinator_store))
        return TCPStore(LOOPBACK, port, is_master=False, timeout=_GROUP_TIMEOUT)
    if is_server:
        store = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=_GROUP_TIMEOUT)
        coordinator_store.set("address", f"{address}:{store.port}")
        return store
    return TCPStore(*_read_address(coordinator_store), is_master=False, timeout=_GROUP_TIMEOUT)


def _read_address(coordinator_store: Store) -> tuple[str, int]:
    address, _, port = coordinator_store.get("address").decode().rpartition(":")
    return address, int(port)


def _measure_backend(backend: str, store: Store, rank: int, world_size: int) -> dict[str, float]:
    """Return setup_seconds, seconds and bytes of an all-reduce over `backend`, and large_seconds and large_bytes of a larger one.

    `setup_seconds`: time to initialize the process group and run a first all-reduce. `seconds`: median time of further all-reduces.
    `bytes`: size of the reduced tensor. On a slow network, both all-reduces have the same size.
    """
    import torch.distributed as dist

    done_prefix = f"{backend} is over/"
    try:
        timings = _time_all_reduce(backend, store, rank, world_size)
    finally:
        store.set(f"{done_prefix}{rank}", "")
    # Wait for all ranks: a process that exits discards data that a slow link has not delivered yet.
    store.wait([f"{done_prefix}{peer_rank}" for peer_rank in range(world_size)])
    dist.destroy_process_group()
    return timings


def _time_all_reduce(backend: str, store: Store, rank: int, world_size: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    started_at = time.monotonic()
    dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
    device = "cuda" if backend == "nccl" else "cpu"

    def measure(element_count: int, repetitions: int) -> float:
        tensor, times = torch.ones(element_count, device=device), []
        for _ in range(repetitions):
            started_at = time.monotonic()
            dist.all_reduce(tensor)
            if backend == "nccl":
                torch.cuda.synchronize()
            times.append(time.monotonic() - started_at)
        slowest = torch.tensor([statistics.median(times)], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # all ranks must choose the same size next
        return float(slowest.item())

    measure(_ELEMENT_COUNT, 1)
    setup_seconds = time.monotonic() - started_at
    seconds, count = measure(_ELEMENT_COUNT, _REPETITIONS), _ELEMENT_COUNT
    large_seconds = seconds
    while count < _MAX_ELEMENT_COUNT and 2 * large_seconds < _LARGE_SECONDS:
        count *= 2
        large_seconds = measure(count, _LARGE_REPETITIONS)
    sizes = {"bytes": 4.0 * _ELEMENT_COUNT, "large_bytes": 4.0 * count}
    return {"setup_seconds": setup_seconds, "seconds": seconds, "large_seconds": large_seconds, **sizes}
