"""Learning rate warmup for training with larger batches."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def build_linear_scaling_warmup(optimizer: Optimizer, factor: float, steps: int) -> LambdaLR:
    """Return a schedule that scales all learning rates of `optimizer` linearly from 1 to `factor` over `steps` steps.

    Use this schedule if the batch is `factor` times as large as the batch for which the learning rates were tuned (Goyal et al. 2017,
    arXiv 1706.02677: linear scaling, gradual warmup). Call step() of the schedule after step() of the optimizer, and pass the schedule to
    run.register_for_checkpointing(), so that it resumes.
    """
    return LambdaLR(optimizer, lambda step: 1 + (factor - 1) * (min(1.0, step / steps) if steps else 1.0))
