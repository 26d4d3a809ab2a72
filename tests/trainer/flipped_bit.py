"""training_code.py on a machine that flips a bit: one of rank 1's, after its third step. Its disk takes a second for each part."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

import training_code
from swarmtrain.trainer.checkpoint.storage import Writer
from swarmtrain.trainer.optim import Optimizer, Update


def main() -> None:
    sound, fast = Optimizer.step, Writer.write

    def step(optimizer: Optimizer, number: int) -> Update:
        made = sound(optimizer, number)
        if (number, os.environ["RANK"]) == (3, "1"):
            optimizer.parameters["norm.weight"].detach().view(torch.int32)[7] ^= 1
        return made

    def write(writer: Writer) -> dict[str, Any]:
        time.sleep(1.0)
        return fast(writer)

    Optimizer.step, Writer.write = step, write  # type: ignore[method-assign]
    training_code.main()
