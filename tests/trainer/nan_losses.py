"""training_code.py in which the loss of rank 1 is NaN in step 5."""

from __future__ import annotations

import os
from typing import Any

import training_code
from swarmtrain.trainer.custom import model_loop
from swarmtrain.trainer.optim import Optimizer


def main() -> None:
    compute_gradients, scale_loss, number = model_loop.compute_gradients, Optimizer.scale_loss, 0

    def count_steps(*args: Any) -> Any:
        nonlocal number
        number = args[-1].number
        return compute_gradients(*args)

    def scale(optimizer: Optimizer, loss: Any) -> Any:
        return scale_loss(optimizer, loss * float("nan") if number == 5 and os.environ["RANK"] == "1" else loss)

    model_loop.compute_gradients = count_steps
    Optimizer.scale_loss = scale  # type: ignore[method-assign]
    training_code.main()
