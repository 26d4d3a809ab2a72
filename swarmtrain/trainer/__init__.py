"""The trainer: a library that training_code.py calls, in the order in which a page of it reads; and run(), for a script of one's own.

runtime     this rank's surroundings: config, world, device
data        token files, samples, their order
model       a decoder-only transformer
parallel    one mesh; tensor and pipeline parallel within a replica, data parallel between them
optim       AdamW, SGD, Muon, groups, schedules, clipping
memory      what a step will need, before there is one
loop        train(): steps, held-out losses, checkpoints, leaving when asked
checkpoint, metrics, guard, checks, replicas, shortage      what the loop uses
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmtrain.trainer import runtime
    from swarmtrain.trainer.data.samples import Samples, open_data
    from swarmtrain.trainer.loop import Result, train
    from swarmtrain.trainer.model.transformer import Transformer
    from swarmtrain.trainer.optim import Optimizer
    from swarmtrain.trainer.own import Run, make, ramp, run
    from swarmtrain.trainer.parallel import parallelize

__all__ = ["Optimizer", "Result", "Run", "Samples", "Transformer", "make", "open_data", "parallelize", "ramp", "run", "runtime", "train"]

# Imported when asked for: what prepares data needs none of them, nor torch, which takes seconds.
_PLACES = {
    "Optimizer": "optim",
    "Result": "loop",
    "Run": "own",
    "Samples": "data.samples",
    "Transformer": "model.transformer",
    "make": "own",
    "open_data": "data.samples",
    "parallelize": "parallel",
    "ramp": "own",
    "run": "own",
    "train": "loop",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_PLACES.get(name, name)}")
    value: object = getattr(module, name) if name in _PLACES else module
    globals()[name] = value
    return value
