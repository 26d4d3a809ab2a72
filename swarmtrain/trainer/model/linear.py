"""Linear layers of blocks: as they are, in float8, scaled by u-muP, or both."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.fp8 import FP8LinearConfig
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import float8, umup


class Linear(nn.Linear):
    """A linear layer by a product that it is given."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, multiply: umup.Multiply) -> None:
        super().__init__(inputs, outputs, bias=bias)
        self.multiply = multiply

    def forward(self, input: Tensor) -> Tensor:
        return self.multiply(input, self.weight, self.bias)


def linear(shape: TransformerArchitectureConfig, inputs: int, outputs: int, *, bias: bool, fp8: FP8LinearConfig | None) -> nn.Linear:
    """Return a linear layer of a block, whose products are in float8 as `fp8` says."""
    multiply: umup.Multiply = functional.linear
    if fp8 is not None:
        multiply = partial(float8.linear, how=float8.recipe(fp8, emulate=shape.fp8_emulate))
    return (umup.Linear if shape.umup.enable else Linear)(inputs, outputs, bias=bias, multiply=multiply)
