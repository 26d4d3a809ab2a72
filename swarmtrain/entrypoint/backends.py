"""What an interpreter has for ranks, and whether its backends work: `PYTHON -c` of this file, with one word of JSON.

`{}` asks what there is; otherwise this is a process of a group, one on each host, that adds up numbers. It prints one line of JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import sys
from datetime import timedelta
from typing import Any

_PATIENCE = timedelta(seconds=60)


def look() -> dict[str, Any]:
    """Return versions, GPUs, the backends that torch is built with, and what could not be imported."""
    found: dict[str, Any] = {"python": platform.python_version(), "gpus": [], "problems": [], "mpirun": bool(shutil.which("mpirun"))}
    for name in ("swarmtrain", "torch"):
        try:
            found[name] = importlib.import_module(name).__version__
        except Exception as error:  # noqa: BLE001  # a library that does not fit raises what it likes
            found["problems"].append(f"cannot import {name}: {error}")
            found[name] = ""
    if found["torch"]:
        import torch
        import torch.distributed as dist

        found["cuda"] = torch.version.cuda or ""
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        backends = {name: getattr(dist, f"is_{name}_available", lambda: False) for name in ("gloo", "nccl", "mpi")}
        found["backends"] = [name for name, available in backends.items() if dist.is_available() and available()]
        if found["gpus"] and "nccl" in found["backends"]:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # torch's own
    return found


def add_up(backend: str, rank: int, size: int, store: str, interface: str) -> dict[str, float]:
    """Return the sum of 1 to `size` as the group finds it, to which this process gives its own number. Raises what torch does."""
    import torch
    import torch.distributed as dist

    if backend == "mpi":
        dist.init_process_group("mpi")
        rank = dist.get_rank()
    else:
        from swarmtrain.entrypoint.interface import route

        os.environ.update(route(interface, store).environment(os.environ))
        host, _, port = store.rpartition(":")
        meeting = dist.TCPStore(host, int(port), size, is_master=rank == 0, timeout=_PATIENCE)
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=size, timeout=_PATIENCE)
    number = torch.tensor([rank + 1.0], device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(number)
    total = float(number.item())
    dist.barrier()
    dist.destroy_process_group()
    return {"sum": total}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    try:
        answer: dict[str, Any] = add_up(**asked) if asked else look()
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the answer
        answer = {"error": next(iter(str(error).splitlines()), type(error).__name__)}
    print("\n" + json.dumps(answer), flush=True)  # noqa: T201  # to whoever asked
    os._exit(0)
