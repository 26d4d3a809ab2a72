"""Normalization: RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) or LayerNorm (Ba et al. 2016, arXiv 1607.06450)."""

from __future__ import annotations

from torch import nn

from swarmtrain.config.schema.transformer_architecture import NormType, TransformerArchitectureConfig


def build_norm(size: int, architecture: TransformerArchitectureConfig) -> nn.Module:
    """Return the normalization layer that `architecture` selects, for vectors of `size` dimensions."""
    if architecture.norm_type is NormType.rms:
        return nn.RMSNorm(size, eps=architecture.layernorm.layernorm_epsilon)
    return nn.LayerNorm(size, eps=architecture.layernorm.layernorm_epsilon, bias=architecture.layernorm.layernorm_bias)
