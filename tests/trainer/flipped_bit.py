"""training_code.py on a faulty machine: a bit of rank 1's parameters flips after its third step. Writing a part takes an extra second."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import training_code
from swarmtrain.trainer.checkpoint.storage.tensor_storage import TensorStorageWriter
from swarmtrain.trainer.optim import Optimizer, OptimizerUpdate


def main() -> None:
    original_step, original_write = Optimizer.step, TensorStorageWriter.write_staged_shards

    def step(optimizer: Optimizer, number: int) -> OptimizerUpdate:
        update = original_step(optimizer, number)
        if (number, os.environ["RANK"]) == (3, "1"):
            optimizer.parameters["norm.weight"].detach().view(torch.int32)[7] ^= 1
        return update

    def write(writer: TensorStorageWriter) -> dict[str, Any]:
        time.sleep(1.0)
        return original_write(writer)

    Optimizer.step, TensorStorageWriter.write_staged_shards = step, write  # type: ignore[method-assign]
    training_code.main()
