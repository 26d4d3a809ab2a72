"""Training library: the parts that a training script calls.

runtime         config, rank, world size and device of this process
data            token files, samples and their order
model           a decoder-only transformer
objectives      training objectives: next-token prediction, preference tuning (DPO), contrastive learning
parallel        one device mesh; tensor, context and pipeline parallelism within a replica, data parallelism between replicas
optim           AdamW, SGD, Muon, parameter groups, learning rate schedules, gradient clipping
memory          estimates of each rank's memory, without a cluster
speed           measure the speed of a config on this machine
loop            train_model(): the loop of training_code.py in one call
checkpoint      checkpoints: written in the background, restored in any topology
metrics         log lines, events, metric sinks
health          detection of hangs, stragglers, non-finite losses, diverged replicas
tokenize        convert text to token files
inference       generate text, embed texts, evaluate
huggingface     read Hugging Face models
export          convert checkpoints to Hugging Face models
random_seeds    seeds of random number generators
custom          run(): the steps, metrics and checkpoints of a training script
object_factory  create objects from a config
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmtrain.trainer.custom import Run, TrainingResult, build_linear_scaling_warmup, instantiate, run, start_run
    from swarmtrain.trainer.data.samples import TokenDataset, open_data
    from swarmtrain.trainer.loop import train_model
    from swarmtrain.trainer.model.objective import EmbeddingObjective, Objective
    from swarmtrain.trainer.model.transformer import Transformer
    from swarmtrain.trainer.optim import Optimizer
    from swarmtrain.trainer.parallelization import parallelize
    from swarmtrain.trainer.runtime import Runtime, read_config, read_options, start_runtime

__all__ = [
    "EmbeddingObjective",
    "Objective",
    "Optimizer",
    "Run",
    "Runtime",
    "TokenDataset",
    "TrainingResult",
    "Transformer",
    "build_linear_scaling_warmup",
    "instantiate",
    "open_data",
    "parallelize",
    "read_config",
    "read_options",
    "run",
    "start_run",
    "start_runtime",
    "train_model",
]

# Imported on first use: tokenizing data needs neither these modules nor torch, whose import takes seconds.
_MODULE_BY_NAME = {
    "Objective": "model.objective",
    "Optimizer": "optim",
    "Run": "custom",
    "Runtime": "runtime",
    "TokenDataset": "data.samples",
    "TrainingResult": "custom",
    "Transformer": "model.transformer",
    "EmbeddingObjective": "model.objective",
    "build_linear_scaling_warmup": "custom",
    "instantiate": "custom",
    "open_data": "data.samples",
    "parallelize": "parallelization",
    "read_config": "runtime",
    "read_options": "runtime",
    "run": "custom",
    "start_run": "custom",
    "start_runtime": "runtime",
    "train_model": "loop",
}


def __getattr__(name: str) -> object:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_MODULE_BY_NAME[name]}"), name)
    globals()[name] = value
    return value
