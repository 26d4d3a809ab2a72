"""The optimizer: from the gradients at hand to a step, with the gradient of the whole model clipped by its norm.

groups      which parameter is trained how
schedule    learning rates, functions of the step
methods     AdamW, SGD, Muon
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from swarmtrain.config import Config
from swarmtrain.config.optimizer import OptimizerMethod
from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.optim import groups
from swarmtrain.trainer.optim.groups import Group
from swarmtrain.trainer.optim.methods import AdamW, Method, Muon, Sgd, gradient
from swarmtrain.trainer.optim.schedule import learning_rate
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.parallel.tensor import norm


class Optimizer:
    """Makes the steps of all parameters, each by its group's method, rate and weight decay."""

    def __init__(self, model: ParallelModel, config: Config) -> None:
        """Raises TrainingError if training_groups do not fit the model's parameters."""
        self.parameters = model.parameters
        self.groups = groups.divide(list(model.parameters), config)
        self._shards = model.shards
        self._clipping = config.optimizer.gradient_clipping
        self._steps = config.trainer.train_iterations
        self._methods = [(group, method) for group in self.groups for method in _methods(group, model, config)]

    @torch.no_grad()
    def step(self, number: int) -> tuple[float, float]:
        """Make optimizer step `number` (the first is 1) with the gradients at hand, and clear them.

        Return the norm of the whole gradient before clipping, and the first group's learning rate.
        """
        size = norm({name: gradient(parameter) for name, parameter in self.parameters.items()}, self._shards)
        if self._clipping:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), self._clipping, size)
        for group, method in self._methods:
            method.step(number, learning_rate(group.schedule, number, self._steps), group.weight_decay)
        for parameter in self.parameters.values():
            parameter.grad = None
        return float(size), learning_rate(self.groups[0].schedule, number, self._steps)

    def moments(self) -> dict[str, Tensor]:
        """Return the state's tensors, named MOMENT/PARAMETER, to be read or filled in place."""
        return {
            f"{kind}/{name}": tensor
            for _, method in self._methods
            for kind, state in method.moments.items()
            for name, tensor in state.items()
        }


def _methods(group: Group, model: ParallelModel, config: Config) -> Iterator[Method]:
    parts: dict[OptimizerMethod, dict[str, nn.Parameter]] = defaultdict(dict)
    for name in group.parameters:
        parameter = model.parameters[name]
        parts[groups.method(group, name, parameter.dim(), config.optimizer.method)][name] = parameter
    for method, parameters in parts.items():
        match method:
            case OptimizerMethod.adamw:
                yield AdamW(parameters, config.optimizer)
            case OptimizerMethod.sgd:
                yield Sgd(parameters, config.optimizer)
            case OptimizerMethod.muon:
                exact = config.transformer_architecture.precision is Precision.float32
                yield Muon(parameters, config.optimizer, model.shards, exact=exact)
