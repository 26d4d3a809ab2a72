"""training_code.py with bad batches: those at the positions in NAN_POSITIONS (JSON) make a gradient of rank 1 NaN."""

from __future__ import annotations

import json
import os
from typing import Any

from torch import Tensor

import training_code
from swarmtrain.trainer.custom import model_loop
from swarmtrain.trainer.optim import Optimizer, OptimizerUpdate


def main() -> None:
    original_prepare, original_compute = Optimizer.prepare_step, model_loop.compute_gradients
    positions, position = json.loads(os.environ["NAN_POSITIONS"]), -1

    def compute_gradients(*args: Any) -> Any:
        nonlocal position
        position = args[-1].first_sample_position
        return original_compute(*args)

    def prepare(optimizer: Optimizer, number: int, *extra_scalars: Tensor, **options: Any) -> OptimizerUpdate:
        if position in positions and os.environ["RANK"] == "1":
            gradient = optimizer.parameters["norm.weight"].grad
            assert gradient is not None
            gradient[3] = float("nan")
        return original_prepare(optimizer, number, *extra_scalars, **options)

    model_loop.compute_gradients = compute_gradients
    Optimizer.prepare_step = prepare  # type: ignore[method-assign]
    training_code.main()
