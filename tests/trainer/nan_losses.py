"""training_code.py in which the loss of rank 1 is NaN in step 5."""

from __future__ import annotations

import os
from typing import Any

import training_code
from swarmtrain.trainer import loop
from swarmtrain.trainer.optim import Optimizer


def main() -> None:
    train_step, scale_loss, number = loop.train_step, Optimizer.scale_loss, 0

    def count_steps(*args: Any) -> Any:
        nonlocal number
        number = args[-1].number
        return train_step(*args)

    def scale(optimizer: Optimizer, loss: Any) -> Any:
        return scale_loss(optimizer, loss * float("nan") if number == 5 and os.environ["RANK"] == "1" else loss)

    loop.train_step = count_steps
    Optimizer.scale_loss = scale  # type: ignore[method-assign]
    training_code.main()
