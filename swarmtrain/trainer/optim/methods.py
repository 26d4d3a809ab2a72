"""AdamW and SGD: how gradients become a step. Each method owns the state of the parameters that it trains; muon.py is another.

Weight decay is decoupled in all of them: a step takes rate x decay off each parameter. A step depends on its number, the
gradients and the state, on nothing else, so the state's tensors are all that has to be saved. They are laid out like
their parameters, which may be DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from swarmtrain.config.optimizer import OptimizerConfig, StatePrecision

Parameters = Mapping[str, nn.Parameter]
State = dict[str, Tensor]
"""Tensors by the names of their parameters."""

_VECTOR = 16
"""Numbers in the widest vector of any CPU: 512 bits of float32."""


class Method(Protocol):
    """What makes the steps of some parameters."""

    moments: dict[str, State]
    """Its state, by kinds that no other method has."""

    def prepare(self) -> None:
        """Do all of the next step that needs other ranks; it changes neither parameters nor state."""

    def step(self, number: int, rate: float, decay: float) -> None:
        """Make step `number` (the first is 1) with the gradients at hand."""


class AdamW:
    """Loshchilov and Hutter 2017 (arXiv 1711.05101)."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig, shapes: Mapping[str, Sequence[int]]) -> None:
        """`shapes` are those of the undivided parameters, by name."""
        self._parameters, self._config = parameters, config
        self._fused = {name for name, parameter in parameters.items() if fusible(shapes[name], parameter.device)}
        self.moments = {kind: zeros(parameters, config) for kind in ("exp_avg", "exp_avg_sq")}
        # One counter a parameter, since torch raises each; it is set before every step, and so needs no saving.
        self._counters = torch.zeros(len(parameters), device=next(iter(parameters.values())).device)

    def prepare(self) -> None: ...

    def step(self, number: int, rate: float, decay: float) -> None:
        counters = dict(zip(self._parameters, self._counters.fill_(number - 1).unbind(), strict=True))
        if self._config.state_precision is StatePrecision.float32:
            self._step(list(self._parameters), self.moments, counters, rate, decay)
            return
        for name, parameter in self._parameters.items():
            wide = {kind: {name: state[name].to(parameter.dtype)} for kind, state in self.moments.items()}
            self._step([name], wide, counters, rate, decay)
            for kind, state in self.moments.items():
                state[name].copy_(wide[kind][name])

    def _step(self, names: list[str], moments: Mapping[str, State], counters: State, rate: float, decay: float) -> None:
        for fused in (True, False):
            if some := [name for name in names if (name in self._fused) is fused]:
                self._kernel(some, moments, counters, rate, decay, fused=fused)

    def _kernel(self, names: list[str], moments: Mapping[str, State], counters: State, rate: float, decay: float, *, fused: bool) -> None:
        adamw(
            [self._parameters[name] for name in names],
            [gradient(self._parameters[name]) for name in names],
            [moments["exp_avg"][name] for name in names],
            [moments["exp_avg_sq"][name] for name in names],
            [],
            [counters[name] for name in names],
            fused=fused,
            foreach=False,
            amsgrad=False,
            maximize=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._config.eps,
        )


class Sgd:
    """Stochastic gradient descent with momentum, as torch.optim.SGD has it but for the weight decay."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig) -> None:
        self._parameters, self._momentum = parameters, config.momentum
        self.moments = {"sgd_momentum": zeros(parameters, config)}

    def prepare(self) -> None: ...

    def step(self, number: int, rate: float, decay: float) -> None:
        for name, parameter in self._parameters.items():
            kept = self.moments["sgd_momentum"][name]
            total = kept.to(parameter.dtype).mul_(self._momentum).add_(gradient(parameter))
            kept.copy_(total)
            parameter.mul_(1 - rate * decay).add_(total, alpha=-rate)


def fusible(shape: Sequence[int], device: torch.device) -> bool:
    """Return whether the fused kernel updates a parameter of `shape` alike however its rows are divided over ranks.

    On a CPU it rounds what is left over after its last whole vector in another way, so parts must be made of whole vectors.
    """
    return device.type != "cpu" or (len(shape) > 1 and math.prod(shape[1:]) % _VECTOR == 0)


def gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`, which must have one."""
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return parameter.grad


def zeros(parameters: Parameters, config: OptimizerConfig) -> State:
    """Return state of nothing yet for `parameters`, laid out like them."""
    coarse = config.state_precision is StatePrecision.bfloat16
    return {
        name: torch.zeros_like(parameter, dtype=torch.bfloat16 if coarse else None, memory_format=torch.preserve_format)
        for name, parameter in parameters.items()
    }
