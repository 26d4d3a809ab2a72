"""AdamW, SGD and Muon: how gradients become a step. Each method owns the state of the parameters that it trains.

Weight decay is decoupled in all three: a step takes rate x decay off each parameter. A step depends on its number, the
gradients and the state, on nothing else, so the state's tensors are all that has to be saved. They are laid out like
their parameters, which may be DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw

from swarmtrain.config.optimizer import OptimizerConfig, StatePrecision
from swarmtrain.trainer.parallel.shards import Shards

Parameters = Mapping[str, nn.Parameter]
State = dict[str, Tensor]
"""Tensors by the names of their parameters."""

_NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Method(Protocol):
    """What makes the steps of some parameters."""

    moments: dict[str, State]
    """Its state, by kinds that no other method has."""

    def step(self, number: int, rate: float, decay: float) -> None:
        """Make step `number` (the first is 1) with the gradients at hand."""


class AdamW:
    """Loshchilov and Hutter 2017 (arXiv 1711.05101)."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig) -> None:
        self._parameters, self._config = parameters, config
        self.moments = {kind: _zeros(parameters, config) for kind in ("exp_avg", "exp_avg_sq")}
        # One counter a parameter, since the fused kernel raises each; it is set before every step, and so needs no saving.
        self._counters = torch.zeros(len(parameters), device=next(iter(parameters.values())).device)

    def step(self, number: int, rate: float, decay: float) -> None:
        if self._config.state_precision is StatePrecision.float32:
            self._fused(number, rate, decay)
            return
        for name in self._parameters:
            self._coarse(name, number, rate, decay)

    def _fused(self, number: int, rate: float, decay: float) -> None:
        parameters: list[Tensor] = list(self._parameters.values())
        means, squares = (list(state.values()) for state in self.moments.values())
        counters = list(self._counters.fill_(number - 1).unbind())
        adamw(
            parameters,
            [gradient(parameter) for parameter in self._parameters.values()],
            means,
            squares,
            [],
            counters,
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=self._config.beta1,
            beta2=self._config.beta2,
            lr=rate,
            weight_decay=decay,
            eps=self._config.eps,
        )

    def _coarse(self, name: str, number: int, rate: float, decay: float) -> None:
        """Make one parameter's step, whose state is computed in the parameter's precision and kept in less."""
        beta1, beta2 = self._config.beta1, self._config.beta2
        parameter, (mean, square) = self._parameters[name], (state[name] for state in self.moments.values())
        slope = gradient(parameter)
        first = mean.to(parameter.dtype).lerp_(slope, 1 - beta1)
        second = square.to(parameter.dtype).mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        mean.copy_(first)
        square.copy_(second)
        width = second.div_(1 - beta2**number).sqrt_().add_(self._config.eps)
        parameter.mul_(1 - rate * decay).addcdiv_(first, width, value=-rate / (1 - beta1**number))


class Sgd:
    """Stochastic gradient descent with momentum, as torch.optim.SGD has it but for the weight decay."""

    def __init__(self, parameters: Parameters, config: OptimizerConfig) -> None:
        self._parameters, self._momentum = parameters, config.momentum
        self.moments = {"sgd_momentum": _zeros(parameters, config)}

    def step(self, number: int, rate: float, decay: float) -> None:
        for name, parameter in self._parameters.items():
            kept = self.moments["sgd_momentum"][name]
            total = kept.to(parameter.dtype).mul_(self._momentum).add_(gradient(parameter))
            kept.copy_(total)
            parameter.mul_(1 - rate * decay).add_(total, alpha=-rate)


class Muon:
    """Jordan et al. 2024 (kellerjordan.github.io/posts/muon): the mean of a matrix's gradients, made orthogonal.

    Scaled as by Liu et al. 2025 (arXiv 2502.16982), so that learning rates and weight decays of AdamW serve for it too.
    A matrix that is divided over ranks is gathered whole, made orthogonal on each of them, and each takes its part: what
    is done is the same in every topology.
    """

    def __init__(self, parameters: Parameters, config: OptimizerConfig, shards: Shards, *, exact: bool) -> None:
        """`exact`: make orthogonal in the parameters' own precision; else in bfloat16, at a fraction of the cost."""
        self._parameters, self._momentum, self._shards, self._exact = parameters, config.momentum, shards, exact
        self.moments = {"muon_momentum": _zeros(parameters, config)}

    def step(self, number: int, rate: float, decay: float) -> None:
        for name, parameter in self._parameters.items():
            kept, slope = self.moments["muon_momentum"][name], gradient(parameter)
            mean = kept.to(parameter.dtype).lerp_(slope, 1 - self._momentum)
            kept.copy_(mean)
            ahead = slope.lerp(mean, self._momentum)  # Nesterov's
            change, scale = self._change(name, ahead)
            parameter.mul_(1 - rate * decay).sub_(change.to(parameter.dtype), alpha=rate * scale)

    def _change(self, name: str, ahead: Tensor) -> tuple[Tensor, float]:
        """Return `ahead` made orthogonal, laid out as it is, and the factor that makes it as long as AdamW's steps are."""
        whole = self._shards.whole(name, ahead if self._exact else ahead.bfloat16())
        scale = 0.2 * max(whole.shape) ** 0.5
        if not isinstance(whole, DTensor):
            return orthogonal(whole), scale
        mesh = whole.device_mesh
        copies = DTensor.from_local(orthogonal(whole.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
        divided = copies.redistribute(placements=whole.placements)
        return divided if isinstance(ahead, DTensor) else divided.to_local(), scale


def gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`, which must have one."""
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return parameter.grad


def orthogonal(matrix: Tensor) -> Tensor:
    """Return nearly U V' of the singular value decomposition U S V' of `matrix`: singular values become 0.7 to 1.2."""
    a, b, c = _NEWTON_SCHULZ
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, gram, wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def _zeros(parameters: Parameters, config: OptimizerConfig) -> State:
    coarse = config.state_precision is StatePrecision.bfloat16
    return {
        name: torch.zeros_like(parameter, dtype=torch.bfloat16 if coarse else None, memory_format=torch.preserve_format)
        for name, parameter in parameters.items()
    }
