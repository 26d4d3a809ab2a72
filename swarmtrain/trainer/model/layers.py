"""Layers that the architecture selects: linear layers of transformer blocks, normalization, and the output layer."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.fp8 import FP8LinearConfig
from swarmtrain.config.schema.transformer_architecture import NormType, TransformerArchitectureConfig
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


def build_norm(size: int, architecture: TransformerArchitectureConfig) -> nn.Module:
    """Return the normalization layer that `architecture` selects, for vectors of `size` dimensions.

    It is RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) or LayerNorm (Ba et al. 2016, arXiv 1607.06450).
    """
    if architecture.norm_type is NormType.rms:
        return nn.RMSNorm(size, eps=architecture.layernorm.layernorm_epsilon)
    return nn.LayerNorm(size, eps=architecture.layernorm.layernorm_epsilon, bias=architecture.layernorm.layernorm_bias)


class _SoftCappedOutputLayer(nn.Linear):
    """Output layer whose logits s are bounded by c, to c tanh(s / c) (Gemma 2: Gemma Team 2024, arXiv 2408.00118)."""

    def __init__(self, hidden_size: int, vocab_size: int, softcap: float) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        return self.softcap * torch.tanh(super().forward(hidden) / self.softcap)


def build_output_layer(architecture: TransformerArchitectureConfig) -> nn.Linear:
    """Return the output layer of `architecture`, which maps hidden states to logits (hidden size to vocabulary)."""
    if architecture.umup.enable:
        return umup.UnitScaledHead(architecture)
    if architecture.logit_softcap is not None:
        return _SoftCappedOutputLayer(architecture.hidden_size, architecture.vocab_size, architecture.logit_softcap)
    return nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
