"""Linear layers of transformer blocks: plain, in float8, with u-muP scaling, or with both."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.fp8 import FP8LinearConfig
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import float8, umup


class FunctionalLinear(nn.Linear):
    """A linear layer whose output is computed by `linear_function(input, weight, bias)`."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool, linear_function: umup.LinearFunction) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.multiply = linear_function

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight, self.bias)


def build_linear(
    architecture: TransformerArchitectureConfig, in_features: int, out_features: int, *, bias: bool, fp8: FP8LinearConfig | None
) -> nn.Linear:
    """Return a linear layer for a transformer block.

    It multiplies in float8 if `fp8` is given, and uses u-muP scaling if the architecture enables it.
    """
    linear_function: umup.LinearFunction = functional.linear
    if fp8 is not None:
        linear_function = partial(float8.compute_linear, recipe=float8.build_recipe(fp8, emulate=architecture.fp8_emulate))
    return (umup.UnitScaledLinear if architecture.umup.enable else FunctionalLinear)(
        in_features, out_features, bias=bias, linear_function=linear_function
    )
