"""Data-parallel collectives on the CPU that behave as those over NCCL on a GPU, for ranks that import this module.

A collective returns at once and runs on its own. Whoever first needs its result waits without the GIL and without a timeout: if a peer has
died, forever. `abort` ends all waits, and leaves arbitrary values. Like the NCCL watchdog of torch, it ends the process if a collective
fails, unless TORCH_NCCL_ASYNC_ERROR_HANDLING is 0.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.trainer.parallel.mesh import Mesh

_NO_TIMEOUT = timedelta(days=1)
_GARBAGE = 1e30


class _Collective(dist._Work):
    """A collective that has started."""

    def __init__(self, tensors: list[Tensor], run: Callable[[Tensor], object]) -> None:
        """`run` runs the collective on one of `tensors`, in place."""
        super().__init__()
        self.tensors, self.run = tensors, run
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

    def finish(self, results: Sequence[Tensor] | None) -> None:
        """Set the results, unless they are set; None: arbitrary values."""
        with self._lock:
            if self._future.done():
                return
            for tensor, result in zip(self.tensors, results or self.tensors, strict=True):
                if results is None:
                    tensor.fill_(_GARBAGE)
                else:
                    tensor.copy_(result)
            self._future.set_result(self.tensors)


class DeviceGroup(dist.ProcessGroup):
    """A process group of all ranks whose collectives run on their own, in the order in which they started."""

    def __init__(self) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size())
        self._gloo_group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        self._queue: queue.SimpleQueue[_Collective] = queue.SimpleQueue()
        self._started: list[_Collective] = []
        self._is_aborted = False
        threading.Thread(target=self._run_collectives, name="device", daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "device"

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> _Collective:
        return self._start(tensors, lambda tensor: dist.all_reduce(tensor, group=self._gloo_group))

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Collective:
        return self._start(tensors, lambda tensor: dist.broadcast(tensor, group=self._gloo_group, group_src=options.rootRank))

    def _start(self, tensors: list[Tensor], run: Callable[[Tensor], object]) -> _Collective:
        collective = _Collective(tensors, run)
        self._started.append(collective)
        self._queue.put(collective)
        if self._is_aborted:
            collective.finish(None)
        return collective

    def abort(self) -> None:
        """End all collectives, and leave arbitrary values in their results."""
        self._is_aborted = True
        for collective in self._started:
            collective.finish(None)

    def _run_collectives(self) -> None:
        while True:
            collective = self._queue.get()
            results = [tensor.clone() for tensor in collective.tensors]
            try:
                for result in results:
                    collective.run(result)
            except RuntimeError:
                if os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") != "0":
                    os.abort()
                return  # as a kernel that waits forever
            collective.finish(results)
            self._started.remove(collective)


def install() -> None:
    """Use these collectives for all gradients of this process."""
    get_group = cache(lambda _pid: DeviceGroup())
    Mesh.data_parallel_group = property(lambda _mesh: get_group(os.getpid()))  # type: ignore[assignment,method-assign]
