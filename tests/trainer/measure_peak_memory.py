"""Run the steps of training_code.py, and write two peaks in bytes to peak-RANK: tensor memory, and memory from the C library.

Tensor memory is counted independently of the trainer: over all existing storages.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swarmtrain.trainer import Optimizer, Transformer, open_data, parallelize, read_config, start_runtime
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.step import StepRequest, train_step

_LIBC = ctypes.CDLL(None)
_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES = -3, 8192
_SETTLE_SECONDS = 0.01
"""Seconds for a gloo thread to drop its tensors once its work is done: on a busy machine it may have to wait for a core."""


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


_LIBC.mallinfo2.restype = _MallocInfo


class _PeakSampler(TorchDispatchMode):
    """Samples the memory in use after every operation, whichever thread frees it."""

    def __init__(self) -> None:
        super().__init__()
        self._baseline, self.peak, self.tensors = read_bytes_in_use(), 0, 0
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = storage
        if any(now > most for now, most in zip(self._measure(), (self.tensors, self.peak), strict=True)):
            time.sleep(_SETTLE_SECONDS)
            tensors, peak = self._measure()
            self.tensors, self.peak = max(self.tensors, tensors), max(self.peak, peak)
        return out

    def _measure(self) -> tuple[int, int]:
        return sum(storage.nbytes() for storage in list(self._storages.values())), read_bytes_in_use() - self._baseline


def main() -> None:
    _LIBC.mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)  # larger allocations get their own pages, and are counted
    config = read_config([])
    with start_runtime(config) as rank_runtime:
        data, _ = open_data(config)
        with _PeakSampler() as sampler:
            model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), rank_runtime)
            optimizer = Optimizer(model, config)
            for number in (1, 2):
                train_step(rank_runtime, model, optimizer, data, StepRequest(number, 0, StopFlag()))
        Path(f"peak-{rank_runtime.rank}").write_text(f"{sampler.tensors} {sampler.peak}")


def read_bytes_in_use() -> int:
    """Return the bytes of all larger allocations of the C library: those with their own pages."""
    size: int = _LIBC.mallinfo2().hblkhd
    return size
