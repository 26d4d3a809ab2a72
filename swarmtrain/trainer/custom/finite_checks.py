"""Ends the run of a custom script whose loss or parameters are not finite: what follows is worth neither time nor a checkpoint.

The built-in trainer decides this before each update (swarmtrain.trainer.non_finite_policy). A script updates by itself, so here a loss is
checked when it is logged, and parameters before they are saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swarmtrain.config.schema.trainer import NonFiniteAction, TrainerConfig
from swarmtrain.errors import TrainingError

_LOSS = "loss"
_HINT = (
    "lower the learning rate, or find the operation with torch.autograd.set_detect_anomaly(True); the newest checkpoint is from before. "
    "If the script skips such steps by itself, set trainer.non_finite: skip"
)


class LossCheck:
    """Check of the losses that all ranks log: with `non_finite: stop`, the first that is not finite ends the run, with `skip` several."""

    def __init__(self, config: TrainerConfig) -> None:
        """Raises TrainingError for `roll_back`, which only the trainer can do that also selects the batches."""
        if config.non_finite is NonFiniteAction.roll_back:
            raise TrainingError(
                "roll_back does not work in a custom script: it cannot skip a batch of the script's own data",
                place="config trainer.non_finite",
                hint="use stop, or skip for a script that skips such steps by itself",
            )
        self._max_steps = config.non_finite_steps if config.non_finite is NonFiniteAction.skip else 1
        self._consecutive_count = 0

    def check_metrics(self, metrics_line: Mapping[str, Any]) -> None:
        """Raise TrainingError if the metric `loss` of a step is not finite (None) once more often in a row than is allowed."""
        if _LOSS not in metrics_line:
            return
        self._consecutive_count = self._consecutive_count + 1 if metrics_line[_LOSS] is None else 0
        if self._consecutive_count >= self._max_steps:
            in_a_row = f" for {self._consecutive_count} logged steps in a row" if self._consecutive_count > 1 else ""
            raise TrainingError(f"the loss is not finite{in_a_row}", place=f"step {metrics_line['step']}", hint=_HINT)


def check_parameters(parameters: Mapping[str, Tensor], step: int) -> None:
    """Raise TrainingError if one of the trained `parameters` after `step` contains NaN or Inf, which no later step removes."""
    tensors = {name: tensor.detach() for name, tensor in parameters.items() if tensor.requires_grad}
    flags = [tensor.isfinite().all() for tensor in tensors.values()]
    finite = torch.stack(flags).tolist() if flags else []  # copied from the device together
    if names := [name for name, is_finite in zip(tensors, finite, strict=True) if not is_finite]:
        raise TrainingError(
            f"is not saved: {len(names)} of {len(tensors)} trained parameters contain NaN or Inf, the first of them is {names[0]}",
            place=f"step {step}",
            hint=_HINT,
        )
