"""training_code.py on a machine that flips a bit: one of rank 1's, after its third step."""

from __future__ import annotations

import os

import torch

import training_code
from swarmtrain.trainer.optim import Optimizer, Update


def main() -> None:
    sound = Optimizer.step

    def step(optimizer: Optimizer, number: int) -> Update:
        made = sound(optimizer, number)
        if (number, os.environ["RANK"]) == (3, "1"):
            optimizer.parameters["norm.weight"].detach().view(torch.int32)[7] ^= 1
        return made

    Optimizer.step = step  # type: ignore[method-assign]
    training_code.main()
