"""u-muP, the unit-scaled maximal update parametrization: Blake et al. 2024 (arXiv 2407.17465).

Parameters are initialized with standard deviation 1. Each operation has factors for its output and for the gradient that flows back
through it, so that both initially have a scale close to 1 at every width and depth. With the learning rate multipliers of
`compute_lr_multiplier`, the best learning rate of a narrow model is also the best of a wide model.
An operation's two factors may differ, since AdamW is invariant to a constant factor of a parameter's gradient. They are equal where several
gradients of one tensor are summed, since different factors would change the proportions in the sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig

LinearFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes a linear layer's output from its input, weight and bias."""


def scale_values_and_gradients(values: Tensor, forward_scale: float = 1.0, backward_scale: float = 1.0) -> Tensor:
    """Return `values` x `forward_scale`. In the backward pass the gradient is multiplied by `backward_scale`, not by `forward_scale`."""
    result: Tensor = _ScaleForwardBackward.apply(values, forward_scale, backward_scale)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


class UnitScaledLinear(nn.Linear):
    """Linear layer of a block with u-muP scaling. The gradient of its weight is a sum over tokens of values with unit scale."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, linear_function: LinearFunction = functional.linear) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.multiply = linear_function
        self.scales = in_features**-0.5, in_features**-0.5
        """Factors of the output and of the input's gradient. They must be equal if other layers follow, as in a block."""

    def forward(self, input: Tensor) -> Tensor:
        output_scale, gradient_scale = self.scales
        return self.multiply(
            scale_values_and_gradients(input, output_scale, gradient_scale),
            scale_values_and_gradients(self.weight, 1.0, 1 / output_scale),
            self.bias,
        )


class UnitScaledHead(UnitScaledLinear):
    """Output layer with u-muP scaling. It is followed only by the loss, so its output and gradient factors may differ."""

    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        super().__init__(architecture.hidden_size, architecture.vocab_size, bias=False)
        self.scales = architecture.umup.loss_mult / architecture.hidden_size, architecture.vocab_size**-0.5
        # If all V tokens of the vocabulary are equally likely, the variance of a logit's gradient is (V - 1) / V^2.
        self.loss_gradient_scale = architecture.vocab_size / (architecture.vocab_size - 1) ** 0.5

    def forward(self, input: Tensor) -> Tensor:
        return scale_values_and_gradients(super().forward(input), 1.0, self.loss_gradient_scale)


class _ScaleForwardBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return values.view_as(values) if forward == 1 else values * forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.backward_factor == 1 else gradient * ctx.backward_factor, None, None


def compute_attention_scales(architecture: TransformerArchitectureConfig) -> tuple[float, float]:
    """Return the u-muP factors of the attention scores and of the attention output.

    The second factor is an empirical fit from the paper: heads that attend uniformly average their values, which lowers the variance of the
    output; heads that attend to one token do not.
    """
    multiplier = architecture.umup.attn_mult
    sharpness = 1 / (1 + 4 * architecture.head_size / multiplier**2)
    length = max(2, architecture.sequence_length)
    std = _compute_log_interpolation(sharpness, (math.log(length) / length) ** 0.5, 1.0)
    return multiplier / architecture.head_size, (1 - architecture.dropout_attention_probs) ** 0.5 / std


def compute_gelu_scale(multiplier: float) -> float:
    """Return the u-muP factor of gelu(multiplier x) / multiplier.

    This function lies between x / 2 (small multiplier) and max(x, 0) (large multiplier).
    """
    return _compute_log_interpolation(1 / (1 + 0.25 / multiplier**2), 2.0, (2 / (1 - 1 / math.pi)) ** 0.5)


def compute_swiglu_scale(multiplier: float) -> float:
    """Return the u-muP factor of x silu(multiplier y) / multiplier.

    This function lies between x y / 2 (small multiplier) and x max(y, 0) (large multiplier).
    """
    return 1 / _compute_log_interpolation(1 / (1 + 1 / multiplier**2), 0.5, 0.5**0.5)


def compute_residual_scales(architecture: TransformerArchitectureConfig, layer: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the factors (branch, residual stream) for the attention branch and for the feed-forward branch of layer `layer`.

    The scaled branch plus the scaled stream has a variance of 1. The branch contributes the same fraction of the variance as it would
    without these factors.
    """
    mlp = architecture.umup.residual_mult * (2 / (1 + architecture.umup.residual_attn_ratio**2)) ** 0.5
    variances = [multiplier**2 / count_residual_branches(architecture) for multiplier in (architecture.umup.residual_attn_ratio * mlp, mlp)]
    stream_variance = 1 + layer * sum(variances)
    attention, feed_forward = variances[0] / stream_variance, variances[1] / (stream_variance + variances[0])
    return _compute_residual_weights(attention), _compute_residual_weights(feed_forward)


def count_residual_branches(architecture: TransformerArchitectureConfig) -> int:
    """Return the number of residual branches; u-muP divides the variance of each branch by it."""
    return architecture.num_layers * (1 if architecture.umup.normalize_depth_to_num_layers else 2)


def compute_lr_multiplier(parameter_name: str, parameter_shape: torch.Size, architecture: TransformerArchitectureConfig) -> float:
    """Return the u-muP learning rate multiplier of a parameter; `parameter_shape`: its unsharded shape. 1 without u-muP."""
    if not architecture.umup.enable:
        return 1.0
    if parameter_name == "embedding.weight":
        return float(parameter_shape[1] ** -0.5)
    if not parameter_name.startswith("blocks."):
        return 1.0
    return float(count_residual_branches(architecture) ** -0.5 * (parameter_shape[1] ** -0.5 if len(parameter_shape) > 1 else 1.0))


def _compute_residual_weights(ratio: float) -> tuple[float, float]:
    return (ratio / (ratio + 1)) ** 0.5, (1 / (ratio + 1)) ** 0.5


def _compute_log_interpolation(fraction: float, low: float, high: float) -> float:
    """Return the geometric interpolation between `low` (fraction 0) and `high` (fraction 1)."""
    return math.exp(fraction * math.log(high) + (1 - fraction) * math.log(low))
