"""The optimizer: AdamW on this rank's plain tensors, with the gradient of the whole model clipped by its norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swarmtrain.config import Config
from swarmtrain.trainer.optim import groups
from swarmtrain.trainer.optim.schedule import learning_rate
from swarmtrain.trainer.parallel import ParallelModel

METHODS = {"adamw": torch.optim.AdamW}
MOMENTS = ("exp_avg", "exp_avg_sq")
_VECTOR = 16
"""Numbers in the widest vector of any CPU: 512 bits of float32."""


class Optimizer:
    """AdamW (Loshchilov and Hutter 2017, arXiv 1711.05101), its state in fp32, its rates functions of the step."""

    def __init__(self, model: ParallelModel, config: Config) -> None:
        """Raises TrainingError if training_groups do not fit the model's parameters."""
        self.parameters = model.parameters
        self.groups = groups.divide(list(model.parameters), config)
        self._shards = model.shards
        self._clipping = config.optimizer.gradient_clipping
        self._steps = config.trainer.train_iterations
        self._adamw = METHODS[config.optimizer.method](
            [
                {"params": parameters, "fused": fused, "weight_decay": group.weight_decay, "schedule": group.schedule}
                for group in self.groups
                for fused in (True, False)
                if (parameters := [self.parameters[name] for name in group.parameters if self._fused(name) == fused])
            ],
            lr=0.0,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            eps=config.optimizer.eps,
        )
        self.set_step(0)

    def step(self, number: int) -> tuple[float, float]:
        """Make optimizer step `number` (the first is 1) with the gradients at hand, and clear them.

        Return the norm of the whole gradient before clipping, and the first group's learning rate.
        """
        gradients = {name: _gradient(name, parameter) for name, parameter in self.parameters.items()}
        size = self._shards.norm(gradients)
        if self._clipping:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self._clipping, size)
        for options in self._adamw.param_groups:
            options["lr"] = learning_rate(options["schedule"], number, self._steps)
        self._adamw.step()
        self._adamw.zero_grad()
        return float(size), float(self._adamw.param_groups[0]["lr"])

    def _fused(self, name: str) -> bool:
        return fused(self._shards.shapes[name], self.parameters[name].device)

    def moments(self) -> dict[str, Tensor]:
        """Return the state's tensors, named MOMENT/PARAMETER, to be read or filled in place."""
        return {
            f"{moment}/{name}": self._adamw.state[parameter][moment] for name, parameter in self.parameters.items() for moment in MOMENTS
        }

    def set_step(self, number: int) -> None:
        """Go to where `number` steps have been made. The moments are kept, or made as zeros."""
        for parameter in self.parameters.values():
            state = self._adamw.state[parameter]
            for moment in MOMENTS:
                state.setdefault(moment, torch.zeros_like(parameter, memory_format=torch.preserve_format))
            state["step"] = torch.tensor(float(number), device=parameter.device)


def fused(shape: torch.Size, device: torch.device) -> bool:
    """Return whether the fused kernel updates a parameter of `shape` alike however its rows are divided over ranks.

    On a CPU it rounds what is left over after its last whole vector in another way, so parts must be made of whole vectors.
    """
    return device.type != "cpu" or (len(shape) > 1 and shape[1:].numel() % _VECTOR == 0)


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError(f"parameter {name} took no part in the loss")
    return parameter.grad
