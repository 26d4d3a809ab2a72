"""The steps of training_code.py, and the most memory that this process has had from the C library meanwhile: bytes, into peak-RANK.

And beside it what tensors had, counted apart from how the trainer counts it: by all storages that there are.
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

from swarmtrain.trainer import Optimizer, Transformer, open_data, parallelize, runtime
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.step import make_step

_C = ctypes.CDLL(None)
_M_MMAP_THRESHOLD, _SMALL = -3, 8192
_SETTLED_AFTER = 0.01
"""Seconds in which a thread of gloo whose work is done gets to drop its tensors: on a busy machine it may have to wait for a core."""


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


_C.mallinfo2.restype = _Mallinfo


class _Sampled(TorchDispatchMode):
    """Looks at the memory in use after every operation, whichever thread lets go of it."""

    def __init__(self) -> None:
        super().__init__()
        self._before, self.peak, self.tensors = in_use(), 0, 0
        self._there: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                self._there[storage._cdata] = storage
        if any(now > most for now, most in zip(self._measure(), (self.tensors, self.peak), strict=True)):
            time.sleep(_SETTLED_AFTER)
            tensors, peak = self._measure()
            self.tensors, self.peak = max(self.tensors, tensors), max(self.peak, peak)
        return out

    def _measure(self) -> tuple[int, int]:
        return sum(storage.nbytes() for storage in list(self._there.values())), in_use() - self._before


def main() -> None:
    _C.mallopt(_M_MMAP_THRESHOLD, _SMALL)  # what is larger has pages of its own, and is counted
    config = runtime.read_config([])
    with runtime.start(config) as here:
        data, _ = open_data(config)
        with _Sampled() as seen:
            model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), here)
            optimizer = Optimizer(model, config)
            for number in (1, 2):
                make_step(here, model, optimizer, data, position=0, number=number, stop=StopFlag())
        Path(f"peak-{here.rank}").write_text(f"{seen.tensors} {seen.peak}")


def in_use() -> int:
    """Return the bytes of all larger pieces that the C library has given out."""
    size: int = _C.mallinfo2().hblkhd
    return size
