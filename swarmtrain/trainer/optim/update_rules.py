"""AdamW and SGD: how gradients become an update. Each method owns the state of the parameters that it trains; muon.py is a third one.

Weight decay is decoupled in all of them: a step multiplies each parameter by 1 - learning rate x decay. A step depends only on its number,
the gradients and the state, so the state's tensors are all that has to be saved. They are laid out like their parameters, which may be
DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from swarmtrain.config.schema.optimizer import OptimizerConfig, StatePrecision

NamedParameters = Mapping[str, nn.Parameter]
NamedTensors = dict[str, Tensor]
"""Tensors by the names of their parameters."""

_MAX_VECTOR_ELEMENTS = 16
"""Elements in the widest vector register of any CPU: 512 bits of float32."""


class UpdateRule(Protocol):
    """Updates some of the parameters."""

    moments: dict[str, NamedTensors]
    """Optimizer state by kind; no other method uses the same kinds."""

    def prepare_step(self) -> None:
        """Do everything in the next step that needs other ranks; changes neither parameters nor state."""

    def step(self, number: int, learning_rate: float, weight_decay: float) -> None:
        """Run step `number` (the first is 1) with the current gradients."""


class AdamW:
    """AdamW: Loshchilov and Hutter 2017 (arXiv 1711.05101)."""

    def __init__(self, parameters: NamedParameters, config: OptimizerConfig, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes` are those of the undivided parameters, by name."""
        self._parameters, self._config = parameters, config
        self._fused_names = {name for name, parameter in parameters.items() if is_fusible(shapes[name], parameter.device)}
        self.moments = {kind: create_zero_state(parameters, config) for kind in ("exp_avg", "exp_avg_sq")}
        # One counter per parameter, since torch increments each; it is set before every step, and so needs no saving.
        self._step_counters = torch.zeros(len(parameters), device=next(iter(parameters.values())).device)

    def prepare_step(self) -> None: ...

    def step(self, number: int, learning_rate: float, weight_decay: float) -> None:
        step_counters = dict(zip(self._parameters, self._step_counters.fill_(number - 1).unbind(), strict=True))
        if self._config.state_precision is StatePrecision.float32:
            self._update_parameters(list(self._parameters), self.moments, step_counters, learning_rate, weight_decay)
            return
        for name, parameter in self._parameters.items():
            float32_moments = {kind: {name: state[name].to(parameter.dtype)} for kind, state in self.moments.items()}
            self._update_parameters([name], float32_moments, step_counters, learning_rate, weight_decay)
            for kind, state in self.moments.items():
                state[name].copy_(float32_moments[kind][name])

    def _update_parameters(
        self, names: list[str], moments: Mapping[str, NamedTensors], step_counters: NamedTensors, learning_rate: float, weight_decay: float
    ) -> None:
        for fused in (True, False):
            if selected_names := [name for name in names if (name in self._fused_names) is fused]:
                self._run_kernel(selected_names, moments, step_counters, learning_rate, weight_decay, fused=fused)

    def _run_kernel(
        self,
        names: list[str],
        moments: Mapping[str, NamedTensors],
        step_counters: NamedTensors,
        learning_rate: float,
        weight_decay: float,
        *,
        fused: bool,
    ) -> None:
        adamw(
            [self._parameters[name] for name in names],
            [require_gradient(self._parameters[name]) for name in names],
            [moments["exp_avg"][name] for name in names],
            [moments["exp_avg_sq"][name] for name in names],
            [],
            [step_counters[name] for name in names],
            fused=fused,
            foreach=False,
            amsgrad=False,
            maximize=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=self._config.eps,
        )


class Sgd:
    """Stochastic gradient descent with momentum, like torch.optim.SGD except for the weight decay."""

    def __init__(self, parameters: NamedParameters, config: OptimizerConfig) -> None:
        self._parameters, self._momentum = parameters, config.momentum
        self.moments = {"sgd_momentum": create_zero_state(parameters, config)}

    def prepare_step(self) -> None: ...

    def step(self, number: int, learning_rate: float, weight_decay: float) -> None:
        for name, parameter in self._parameters.items():
            momentum = self.moments["sgd_momentum"][name]
            new_momentum = momentum.to(parameter.dtype).mul_(self._momentum).add_(require_gradient(parameter))
            momentum.copy_(new_momentum)
            parameter.mul_(1 - learning_rate * weight_decay).add_(new_momentum, alpha=-learning_rate)


def is_fusible(shape: Sequence[int], device: torch.device) -> bool:
    """Return whether the fused kernel updates a parameter of `shape` identically however its rows are divided over ranks.

    On a CPU it rounds the remainder after the last full vector differently, so parts must consist of full vectors.
    """
    return device.type != "cpu" or (len(shape) > 1 and math.prod(shape[1:]) % _MAX_VECTOR_ELEMENTS == 0)


def require_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`. Raises RuntimeError if it has none."""
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return parameter.grad


def create_zero_state(parameters: NamedParameters, config: OptimizerConfig) -> NamedTensors:
    """Return zero-initialized state for `parameters`, laid out like them."""
    use_bfloat16 = config.state_precision is StatePrecision.bfloat16
    return {
        name: torch.zeros_like(parameter, dtype=torch.bfloat16 if use_bfloat16 else None, memory_format=torch.preserve_format)
        for name, parameter in parameters.items()
    }
