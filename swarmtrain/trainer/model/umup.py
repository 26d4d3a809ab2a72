"""u-muP, the unit-scaled maximal update parametrization: Blake et al. 2024 (arXiv 2407.17465).

Parameters are initialized with a standard deviation of one, and each operation has a factor by which its output and the gradient that flows
back through it initially have a scale near one as well, at every width and depth. Together with the learning rates (see
`compute_lr_multiplier`) this makes the best learning rate of a narrow model that of a wide one. AdamW is invariant to a constant factor of
a gradient; where such a factor would change how gradients of one tensor add up, both directions have the same factor.
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


def scale_values(values: Tensor, forward: float = 1.0, backward: float = 1.0) -> Tensor:
    """Return `values` x `forward`; the gradient is multiplied by `backward` instead."""
    result: Tensor = _ScaleForwardBackward.apply(values, forward, backward)  # type: ignore[no-untyped-call]  # torch's own is not typed
    return result


class UnitScaledLinear(nn.Linear):
    """A linear layer of a block. The gradient of a weight is a sum over tokens of unit-scale values."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, multiply: LinearFunction = functional.linear) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.multiply = multiply
        self.scales = inputs**-0.5, inputs**-0.5
        """Factors of the output and of the input's gradient. For a layer between other layers the two must be equal."""

    def forward(self, input: Tensor) -> Tensor:
        output_scale, gradient_scale = self.scales
        return self.multiply(scale_values(input, output_scale, gradient_scale), scale_values(self.weight, 1.0, 1 / output_scale), self.bias)


class UnitScaledHead(UnitScaledLinear):
    """The output layer. Only the loss follows it, so its two factors may differ."""

    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        super().__init__(architecture.hidden_size, architecture.vocab_size, bias=False)
        self.scales = architecture.umup.loss_mult / architecture.hidden_size, architecture.vocab_size**-0.5
        # If all tokens are equally likely, the variance of a gradient is (V - 1) / V^2.
        self.loss_gradient_scale = architecture.vocab_size / (architecture.vocab_size - 1) ** 0.5

    def forward(self, input: Tensor) -> Tensor:
        return scale_values(super().forward(input), 1.0, self.loss_gradient_scale)


class _ScaleForwardBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return values.view_as(values) if forward == 1 else values * forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.backward_factor == 1 else gradient * ctx.backward_factor, None, None


def build_output_layer(architecture: TransformerArchitectureConfig) -> nn.Linear:
    """Return the output layer."""
    return (
        UnitScaledHead(architecture)
        if architecture.umup.enable
        else nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
    )


def compute_attention_scales(architecture: TransformerArchitectureConfig) -> tuple[float, float]:
    """Return the factors of the attention scores and of the attention output.

    The second is the paper's fit: heads that attend uniformly average their values, heads that attend to one token do not.
    """
    multiplier = architecture.umup.attn_mult
    sharpness = 1 / (1 + 4 * architecture.head_size / multiplier**2)
    length = max(2, architecture.sequence_length)
    std = _interpolate_log(sharpness, (math.log(length) / length) ** 0.5, 1.0)
    return multiplier / architecture.head_size, (1 - architecture.dropout_attention_probs) ** 0.5 / std


def compute_gelu_scale(multiplier: float) -> float:
    """Return the factor of gelu(multiplier x) / multiplier, which lies between x / 2 and max(x, 0)."""
    return _interpolate_log(1 / (1 + 0.25 / multiplier**2), 2.0, (2 / (1 - 1 / math.pi)) ** 0.5)


def compute_swiglu_scale(multiplier: float) -> float:
    """Return the factor of x silu(multiplier y) / multiplier, which lies between x y / 2 and x max(y, 0)."""
    return 1 / _interpolate_log(1 / (1 + 1 / multiplier**2), 0.5, 0.5**0.5)


def compute_residual_scales(architecture: TransformerArchitectureConfig, layer: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the factors of a branch and of the residual stream: for attention, and for the feed-forward block, of layer `layer`.

    Their sum has a variance of one, and each branch's share of it is what it would be if the stream grew without these factors.
    """
    mlp = architecture.umup.residual_mult * (2 / (1 + architecture.umup.residual_attn_ratio**2)) ** 0.5
    variances = [multiplier**2 / count_branches(architecture) for multiplier in (architecture.umup.residual_attn_ratio * mlp, mlp)]
    stream_variance = 1 + layer * sum(variances)
    attention, feed_forward = variances[0] / stream_variance, variances[1] / (stream_variance + variances[0])
    return _compute_residual_weights(attention), _compute_residual_weights(feed_forward)


def count_branches(architecture: TransformerArchitectureConfig) -> int:
    """Return the number of residual branches, by which each branch's variance is divided."""
    return architecture.num_layers * (1 if architecture.umup.normalize_depth_to_num_layers else 2)


def compute_lr_multiplier(name: str, size: torch.Size, architecture: TransformerArchitectureConfig) -> float:
    """Return the learning rate multiplier of parameter `name`; `size` is that of the full parameter."""
    if not architecture.umup.enable:
        return 1.0
    if name == "embedding.weight":
        return float(size[1] ** -0.5)
    if not name.startswith("blocks."):
        return 1.0
    return float(count_branches(architecture) ** -0.5 * (size[1] ** -0.5 if len(size) > 1 else 1.0))


def _compute_residual_weights(ratio: float) -> tuple[float, float]:
    return (ratio / (ratio + 1)) ** 0.5, (1 / (ratio + 1)) ** 0.5


def _interpolate_log(fraction: float, low: float, high: float) -> float:
    """Return the geometric interpolation between `low` and `high` at `fraction`."""
    return math.exp(fraction * math.log(high) + (1 - fraction) * math.log(low))
