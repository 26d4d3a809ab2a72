"""training_code.py with batches that are poison: those at the positions in POISON (JSON) make a gradient of rank 1's no number."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import Tensor

import training_code
from swarmtrain.trainer import loop
from swarmtrain.trainer.optim import Optimizer, Update


def main() -> None:
    sound, made = Optimizer.prepare, loop.make_step
    poison, position = json.loads(os.environ["POISON"]), -1

    def make_step(*args: Any, **options: Any) -> Any:
        nonlocal position
        position = options["position"]
        return made(*args, **options)

    def prepare(optimizer: Optimizer, number: int, *beside: Tensor) -> Update:
        if position in poison and os.environ["RANK"] == "1":
            gradient = optimizer.parameters["norm.weight"].grad
            assert gradient is not None
            gradient[3] = float("nan")
        return sound(optimizer, number, *beside)

    loop.make_step = make_step
    Optimizer.prepare = prepare  # type: ignore[method-assign]
    training_code.main()
