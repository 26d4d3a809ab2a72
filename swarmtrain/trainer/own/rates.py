"""Learning rates for larger batches."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def ramp(optimizer: Optimizer, factor: float, steps: int) -> LambdaLR:
    """Return a schedule that takes all rates of `optimizer` to `factor` times what they are, in a line, over so many steps.

    For a batch that is `factor` times that for which the rates were found (Goyal et al. 2017, arXiv 1706.02677: linear scaling, gradual
    warm-up). Call its step() after the optimizer's, and give it to run.keep(), so that it goes on where it was.
    """
    return LambdaLR(optimizer, lambda step: 1 + (factor - 1) * (min(1.0, step / steps) if steps else 1.0))
