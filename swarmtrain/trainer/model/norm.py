"""Normalisation: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) or LayerNorm (Ba et al. 2016, 1607.06450)."""

from __future__ import annotations

from torch import nn

from swarmtrain.config.transformer_architecture import NormType, TransformerArchitectureConfig


def norm(size: int, shape: TransformerArchitectureConfig) -> nn.Module:
    """Return the norm that `shape` says, of vectors of `size` dimensions."""
    if shape.norm_type is NormType.rms:
        return nn.RMSNorm(size, eps=shape.layernorm.layernorm_epsilon)
    return nn.LayerNorm(size, eps=shape.layernorm.layernorm_epsilon, bias=shape.layernorm.layernorm_bias)
