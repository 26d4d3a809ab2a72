"""What the ranks' first collective will be like: torch is imported, the nodes meet at the store, and add up some numbers.

One process a node. Prints a line when torch is there, waits for one of JSON on its standard input: what to add to its
environment, and what is broken between this node and others. Prints another line: the versions, the devices, and the
seconds of an all-reduce for each backend, or an error. If anything is broken anywhere, none is tried: it would only hang.
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

from swarmtrain.errors import EXIT_OK
from swarmtrain.wire import NodeEnv, ProbeEnv

if TYPE_CHECKING:
    from torch.distributed import Store

_PLACE = re.compile(r"^\[\S+\] ")  # of a line in torch's own source
_NUMBERS = 1 << 20
_TIMES = 5
_PATIENCE = timedelta(seconds=40)


def main() -> NoReturn:
    """Get ready, wait, print what is found, and end at once, with 0: to take torch down in order takes half a second of CPU."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    told = json.loads(sys.stdin.readline())
    os.environ.update(told["environment"])
    sys.stdout.write(json.dumps(_look(told["broken"])) + "\n")
    sys.stdout.flush()
    os._exit(EXIT_OK)


def _look(broken: str) -> dict[str, Any]:
    try:
        import torch
        from torch.distributed import TCPStore
    except ImportError as error:
        return {"error": str(error)}
    node, probe = NodeEnv.from_env(os.environ), ProbeEnv.from_env(os.environ)
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
    host, _, port = node.store.rpartition(":")
    rank, size = probe.peers.index(node.node), len(probe.peers)
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)
        if known := _anywhere(store, rank, size, broken):
            return {**found, "error": f"not tried, since {known}"}
        found["gloo"] = _all_reduce("gloo", store, rank, size)
        if torch.cuda.is_available() and torch.distributed.is_nccl_available():
            found["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's own
            found["nccl"] = _all_reduce("nccl", store, rank, size)
    except RuntimeError as error:
        return {**found, "error": _PLACE.sub("", str(error).splitlines()[0])}
    return found


def _anywhere(store: Store, rank: int, size: int, broken: str) -> str:
    """Return what is broken at this node or at the first that tells of anything, to all of them the same. Raises RuntimeError."""
    store.set(f"broken/{rank}", broken)
    told = [store.get(f"broken/{each}").decode() for each in range(size)]
    return next(filter(None, told), "")


def _all_reduce(backend: str, store: Store, rank: int, size: int) -> dict[str, float]:
    """Return the seconds to form the group, and those of an all-reduce of 4 MiB (the median of some, after a first)."""
    import torch.distributed as dist

    over = f"{backend} is over/"
    try:
        found = _measured(backend, store, rank, size)
    finally:
        store.set(f"{over}{rank}", "")
    # Who leaves takes along what he has sent and a slow link has not carried yet.
    store.wait([f"{over}{each}" for each in range(size)])
    dist.destroy_process_group()
    return found


def _measured(backend: str, store: Store, rank: int, size: int) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    begun = time.monotonic()
    dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=size, timeout=_PATIENCE)
    tensor = torch.ones(_NUMBERS, device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(tensor)
    formed, times = time.monotonic() - begun, []
    for _ in range(_TIMES):
        begun = time.monotonic()
        dist.all_reduce(tensor)
        if backend == "nccl":
            torch.cuda.synchronize()
        times.append(time.monotonic() - begun)
    return {"formed": formed, "seconds": statistics.median(times), "bytes": float(4 * _NUMBERS)}
