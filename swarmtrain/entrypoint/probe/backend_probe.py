"""Probe of a Python interpreter: its packages and collective backends. This file is run as `PYTHON -c` with one JSON argument.

The argument `{}` requests an inspection of the interpreter. Any other argument describes a process group with one process on each host,
which runs an all-reduce. The result is printed as one JSON line.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from datetime import timedelta
from typing import Any

_GROUP_TIMEOUT = timedelta(seconds=60)


def inspect_interpreter() -> dict[str, Any]:
    """Return this interpreter's package versions, its GPUs, the backends that torch is built with, and import errors."""
    report: dict[str, Any] = {"python": platform.python_version(), "gpus": [], "problems": []}
    for name in ("swarmtrain", "torch"):
        try:
            report[name] = importlib.import_module(name).__version__
        except Exception as error:  # noqa: BLE001  # an incompatible library may raise anything
            report["problems"].append(f"cannot import {name}: {error}")
            report[name] = ""
    if report["torch"]:
        import torch
        import torch.distributed as dist

        report["cuda"] = torch.version.cuda or ""
        report["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        report["backends"] = [name for name in ("gloo", "nccl") if dist.is_available() and getattr(dist, f"is_{name}_available")()]
        if report["gpus"] and "nccl" in report["backends"]:
            report["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]  # not typed in torch
    return report


def run_all_reduce(backend: str, rank: int, world_size: int, store_address: str, interface: str) -> dict[str, float]:
    """Return the sum of rank + 1 over a process group of `world_size` processes as {"sum": …}. Raises any exception of torch."""
    import torch
    import torch.distributed as dist

    from swarmtrain.entrypoint.network_interface import choose_route

    os.environ.update(choose_route(interface, store_address).build_interface_environment(os.environ))
    host, _, port = store_address.rpartition(":")
    tcp_store = dist.TCPStore(host, int(port), world_size, is_master=rank == 0, timeout=_GROUP_TIMEOUT)
    dist.init_process_group(backend, store=tcp_store, rank=rank, world_size=world_size, timeout=_GROUP_TIMEOUT)
    tensor = torch.tensor([rank + 1.0], device="cuda" if backend == "nccl" else "cpu")
    dist.all_reduce(tensor)
    total = float(tensor.item())
    dist.barrier()
    dist.destroy_process_group()
    return {"sum": total}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    try:
        response: dict[str, Any] = run_all_reduce(**request) if request else inspect_interpreter()
    except Exception as error:  # noqa: BLE001  # any error is the response
        response = {"error": next(iter(str(error).splitlines()), type(error).__name__)}
    print("\n" + json.dumps(response), flush=True)  # noqa: T201  # read by the caller
    os._exit(0)
