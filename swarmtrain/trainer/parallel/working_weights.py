"""Mixed precision: the weights with which a model computes, cast from its parameters once per step.

In bfloat16 and float16 the optimizer updates float32 parameters, and forward and backward passes use copies of them in the lower precision
(Micikevicius et al. 2017, arXiv 1710.03740). Frozen parameters may have the lower precision themselves. All operations of a pass then have
inputs of one type, so nothing is cast within it, except the logits. In other precisions, the weights are the parameters themselves.

fully_shard has its own copies: see fsdp.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer

_WORKING_DTYPES = {Precision.bfloat16: torch.bfloat16, Precision.float16: torch.float16}
_SUM_DTYPES = {Precision.float32: torch.float64, Precision.bfloat16: torch.float32, Precision.float16: torch.float32}


def get_working_dtype(precision: Precision) -> torch.dtype | None:
    """Return the type of the weights with which a model in `precision` computes; None if it is that of its parameters."""
    return _WORKING_DTYPES.get(precision)


def get_sum_dtype(precision: Precision) -> torch.dtype | None:
    """Return the type in which gradients of a model in `precision` are summed; None if it is that of the gradients."""
    return _SUM_DTYPES.get(precision)


class WorkingWeights:
    """The weights of a model, which it computes with, and its parameters, which are trained."""

    def __init__(self, model: Transformer) -> None:
        """Replace the parameters of `model` with copies in its working precision, which follow all changes of the parameters."""
        self.parameters = list(model.parameters())
        """The parameters, in the order of the model's weights: what the optimizer updates and checkpoints contain."""
        self.weights = self.parameters
        """The weights, in the order of `parameters`. Backward passes compute their gradients."""
        self._indices: dict[Tensor, int] = {}
        self._cast_versions: list[int | None] = []
        """The version of each parameter from which its weight was cast; None if the weight is freed."""
        dtype = get_working_dtype(model.architecture.precision)
        if dtype is not None:
            copies = {
                parameter: parameter
                if parameter.dtype == dtype
                else nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
                for parameter in self.parameters
            }
            _replace_parameters(model, copies)
            self.weights = list(copies.values())
            self._cast_versions = [parameter._version for parameter in self.parameters]
            model.refresh_weights = self._cast_changed_parameters
        self._indices = {weight: index for index, weight in enumerate(self.weights)}

    @property
    def are_copies(self) -> bool:
        """Whether the weights are copies of the parameters, except of those that have the working precision themselves."""
        return self.weights is not self.parameters

    def get_parameter(self, weight: Tensor) -> nn.Parameter:
        """Return the parameter from which `weight` is cast; `weight` itself if it is a parameter."""
        return self.parameters[self._indices[weight]]

    def free_weight(self, weight: Tensor) -> None:
        """Free the memory of `weight` until the next forward pass. A no-op if it is a parameter."""
        if self.are_copies:
            weight.untyped_storage().resize_(0)
            self._cast_versions[self._indices[weight]] = None

    def _cast_changed_parameters(self) -> None:
        """Cast each parameter that has changed since it was cast, and each one whose weight is freed."""
        # torch increments a parameter's version with most changes in place, and the optimizer and the checkpoint reader with the others.
        changed = [
            index
            for index, parameter in enumerate(self.parameters)
            if parameter is not self.weights[index] and parameter._version != self._cast_versions[index]
        ]
        if not changed:
            return
        for index in changed:
            weight = self.weights[index]
            weight.untyped_storage().resize_(weight.numel() * weight.element_size())
            self._cast_versions[index] = self.parameters[index]._version
        with torch.no_grad():
            torch._foreach_copy_([self.weights[index] for index in changed], [self.parameters[index] for index in changed])


class GradientSums:
    """Sums of the gradients of a model's weights over micro batches, in a higher precision than the gradients."""

    def __init__(self, weights: WorkingWeights, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._weights = weights
        self._sums: dict[Tensor, Tensor] = {}

    def add_gradient(self, weight: Tensor) -> None:
        """Move the gradient of `weight`, if it has one, to its sum."""
        if weight.grad is None:
            return
        if weight in self._sums:
            self._sums[weight] += weight.grad
        else:
            self._sums[weight] = weight.grad.to(self.dtype)
        weight.grad = None

    def take_sum(self, weight: Tensor) -> Tensor | None:
        """Remove and return the sum for `weight`; None if no gradient was added to it."""
        return self._sums.pop(weight, None)

    def move_to_parameters(self) -> None:
        """Make each sum the gradient of its parameter."""
        for weight, total in self._sums.items():
            parameter = self._weights.get_parameter(weight)
            parameter.grad = total.to(parameter.dtype)
        self._sums.clear()


def call_after_each_gradient(weights: Iterable[Tensor], method: Callable[[Tensor], None]) -> None:
    """Call the bound method `method` with each of `weights` as soon as a backward pass has computed its gradient.

    A weight holds its hook in C++, where Python's garbage collector does not look. A hook that held the model would keep the weight, and
    so itself and the model, in memory until the process ends.
    """
    reference = weakref.WeakMethod(method)

    def call_method(weight: Tensor) -> None:
        if (bound_method := reference()) is not None:
            bound_method(weight)

    for weight in weights:
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(call_method)  # type: ignore[no-untyped-call]  # not typed in torch


def _replace_parameters(model: nn.Module, replacements: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = replacements[parameter]
