"""u-muP, the unit-scaled maximal update parametrization: Blake et al. 2024 (arXiv 2407.17465).

Parameters begin with a deviation of one, and each operation has a factor with which what comes out of it, and the
gradient that goes back through it, begin near one as well, at every width and depth. Together with the rates (see
`gain`) that makes the best learning rate of a narrow model that of a wide one. AdamW takes no notice of a constant factor
of a gradient; where one would change how gradients of one tensor add up, the two directions have the same factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Makes a linear layer's output of its input, weight and bias."""


def scaled(values: Tensor, forward: float = 1.0, backward: float = 1.0) -> Tensor:
    """Return `values` x `forward`, whose gradient is multiplied by `backward` instead."""
    result: Tensor = _Scale.apply(values, forward, backward)  # type: ignore[no-untyped-call]  # torch's own is not typed
    return result


class Linear(nn.Linear):
    """A linear layer of a block. The gradient of a weight is a sum over tokens of unit numbers."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, multiply: Multiply = functional.linear) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.multiply = multiply
        self.scales = inputs**-0.5, inputs**-0.5
        """Factors of the output and of the input's gradient. Between other layers the two must be the same."""

    def forward(self, input: Tensor) -> Tensor:
        there, back = self.scales
        return self.multiply(scaled(input, there, back), scaled(self.weight, 1.0, 1 / there), self.bias)


class Head(Linear):
    """The output layer. Nothing but the loss comes after it, so its two factors need not be the same."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__(shape.hidden_size, shape.vocab_size, bias=False)
        self.scales = shape.umup.loss_mult / shape.hidden_size, shape.vocab_size**-0.5
        # All words alike, the variance of a gradient is (V - 1) / V^2.
        self.of_loss = shape.vocab_size / (shape.vocab_size - 1) ** 0.5

    def forward(self, input: Tensor) -> Tensor:
        return scaled(super().forward(input), 1.0, self.of_loss)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_factor = backward
        return values.view_as(values) if forward == 1 else values * forward

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.backward_factor == 1 else gradient * ctx.backward_factor, None, None


def head(shape: TransformerArchitectureConfig) -> nn.Linear:
    """Return the output layer."""
    return Head(shape) if shape.umup.enable else nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)


def attention_scales(shape: TransformerArchitectureConfig) -> tuple[float, float]:
    """Return the factor of scores, and that of what is mixed.

    The second is the paper's fit: heads that look everywhere alike average, those that look at one token do not.
    """
    multiplier = shape.umup.attn_mult
    sharp = 1 / (1 + 4 * shape.head_size / multiplier**2)
    length = max(2, shape.sequence_length)
    deviation = _between(sharp, (math.log(length) / length) ** 0.5, 1.0)
    return multiplier / shape.head_size, (1 - shape.dropout_attention_probs) ** 0.5 / deviation


def gelu_scale(multiplier: float) -> float:
    """Return the factor of gelu(multiplier x) / multiplier, which lies between x / 2 and max(x, 0)."""
    return _between(1 / (1 + 0.25 / multiplier**2), 2.0, (2 / (1 - 1 / math.pi)) ** 0.5)


def swiglu_scale(multiplier: float) -> float:
    """Return the factor of x silu(multiplier y) / multiplier, which lies between x y / 2 and x max(y, 0)."""
    return 1 / _between(1 / (1 + 1 / multiplier**2), 0.5, 0.5**0.5)


def residual_scales(shape: TransformerArchitectureConfig, layer: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the factors of a branch and of the stream beside it: for attention, and for the feed-forward block, of `layer`.

    What they add up to has a variance of one, and each branch's part of it is what it would be if the stream grew.
    """
    mlp = shape.umup.residual_mult * (2 / (1 + shape.umup.residual_attn_ratio**2)) ** 0.5
    variances = [multiplier**2 / depth(shape) for multiplier in (shape.umup.residual_attn_ratio * mlp, mlp)]
    before = 1 + layer * sum(variances)
    attention, feed_forward = variances[0] / before, variances[1] / (before + variances[0])
    return _shares(attention), _shares(feed_forward)


def depth(shape: TransformerArchitectureConfig) -> int:
    """Return the number of branches, by which each is weakened."""
    return shape.num_layers * (1 if shape.umup.normalize_depth_to_num_layers else 2)


def gain(name: str, size: torch.Size, shape: TransformerArchitectureConfig) -> float:
    """Return what the learning rate of parameter `name` is multiplied by; `size` is that of the whole of it."""
    if not shape.umup.enable:
        return 1.0
    if name == "embedding.weight":
        return float(size[1] ** -0.5)
    if not name.startswith("blocks."):
        return 1.0
    return float(depth(shape) ** -0.5 * (size[1] ** -0.5 if len(size) > 1 else 1.0))


def _shares(ratio: float) -> tuple[float, float]:
    return (ratio / (ratio + 1)) ** 0.5, (1 / (ratio + 1)) ** 0.5


def _between(part: float, low: float, high: float) -> float:
    """Return the number that is `part` of the way from `low` to `high`, by ratios."""
    return math.exp(part * math.log(high) + (1 - part) * math.log(low))
