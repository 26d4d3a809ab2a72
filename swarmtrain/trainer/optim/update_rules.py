"""Update rules AdamW and SGD: compute a parameter update from gradients. Muon, the third rule, is in muon.py.

Each rule owns the optimizer state of its parameters. Weight decay is decoupled in all rules: a step multiplies each parameter by 1 -
learning rate x decay. An update depends only on the step number, the gradients and the state, so only the state's tensors are saved. A
state tensor is sharded like its parameter, which may be a DTensor.
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
"""Tensors by parameter name."""

_MAX_VECTOR_ELEMENTS = 16
"""Number of float32 elements in the widest vector register of any CPU (512 bits)."""


class UpdateRule(Protocol):
    """Interface of an update rule: updates a set of parameters from their gradients."""

    moments: dict[str, NamedTensors]
    """Optimizer state: maps the name of each moment, such as exp_avg, to its tensors by parameter name.

    Different update rules use different moment names. The tensors are allocated by the update rule, and initialized by the optimizer.
    """

    communicates: bool
    """Whether `prepare_step` runs collectives."""

    def prepare_step(self) -> None:
        """Run all collectives of the next step, without changing parameters or optimizer state."""

    def step(self, number: int, learning_rate: float, weight_decay: float) -> None:
        """Update the parameters in step `number` (the first is 1) from their current gradients."""


class AdamW:
    """AdamW update rule: Loshchilov and Hutter 2017 (arXiv 1711.05101)."""

    communicates = False

    def __init__(
        self, parameters: NamedParameters, config: OptimizerConfig, shapes: Mapping[str, Sequence[int]], device_type: str | None = None
    ) -> None:
        """Create the update rule for `parameters`.

        `shapes`: shapes of the full parameters, by name. `device_type`: use the kernels for this type of device, such as "cuda"; default:
        that of the parameters.
        """
        self._parameters, self._config = parameters, config
        self._fused_names = {
            name for name, parameter in parameters.items() if can_use_fused_kernel(shapes[name], device_type or parameter.device.type)
        }
        self.moments = {kind: allocate_state(parameters, config) for kind in ("exp_avg", "exp_avg_sq")}
        # Step counters, one per parameter, since torch increments each. They are set before every step, so they are not saved.
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
            [get_gradient_or_raise(self._parameters[name]) for name in names],
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
    """SGD update rule with momentum: like torch.optim.SGD, except that weight decay is decoupled."""

    communicates = False

    def __init__(self, parameters: NamedParameters, config: OptimizerConfig) -> None:
        self._parameters, self._momentum = parameters, config.momentum
        self.moments = {"sgd_momentum": allocate_state(parameters, config)}

    def prepare_step(self) -> None: ...

    def step(self, number: int, learning_rate: float, weight_decay: float) -> None:
        for name, parameter in self._parameters.items():
            momentum = self.moments["sgd_momentum"][name]
            new_momentum = momentum.to(parameter.dtype).mul_(self._momentum).add_(get_gradient_or_raise(parameter))
            momentum.copy_(new_momentum)
            parameter.mul_(1 - learning_rate * weight_decay).add_(new_momentum, alpha=-learning_rate)


def can_use_fused_kernel(shape: Sequence[int], device_type: str) -> bool:
    """Return whether the fused kernel gives the same result for a parameter of `shape` however its rows are sharded over ranks.

    On a CPU the kernel rounds elements after the last full vector register differently, so rows must consist of full vectors.
    """
    return device_type != "cpu" or (len(shape) > 1 and math.prod(shape[1:]) % _MAX_VECTOR_ELEMENTS == 0)


def get_gradient_or_raise(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of `parameter`. Raises RuntimeError if it has none."""
    if parameter.grad is None:
        raise RuntimeError("a parameter did not contribute to the loss")
    return parameter.grad


def allocate_state(parameters: NamedParameters, config: OptimizerConfig) -> NamedTensors:
    """Return uninitialized optimizer state for `parameters`, with the same shape and layout, in the configured state precision."""
    use_bfloat16 = config.state_precision is StatePrecision.bfloat16
    return {
        name: torch.empty_like(parameter, dtype=torch.bfloat16 if use_bfloat16 else None, memory_format=torch.preserve_format)
        for name, parameter in parameters.items()
    }
