"""Embedding head: computes one vector per text. Texts are compared by the cosine similarity of their vectors."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.schema.transformer_architecture import EmbeddingHeadConfig, Pooling, TransformerArchitectureConfig
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX


class EmbeddingHead(nn.Module):
    """Pools the hidden states of a text's tokens into one vector, then applies optional projections and normalizes it to unit length.

    The position-weighted mean is that of SGPT (Muennighoff 2022, arXiv 2202.08904): with causal attention the first tokens have attended
    to only a small part of the text, so their weights are lower.
    """

    def __init__(self, architecture: TransformerArchitectureConfig, config: EmbeddingHeadConfig) -> None:
        super().__init__()
        self._pooling = config.pooling
        widths = architecture.hidden_size, *config.proj_layers
        self.projections = nn.ModuleList(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths))

    def forward(self, hidden: Tensor, *, targets: Tensor) -> Tensor:
        """Return the unit-length vectors (texts, dimensions) of texts, in float32 or higher precision.

        `hidden` (texts, sequence, hidden size); `targets` (texts, sequence): tokens whose target is IGNORE_INDEX are not pooled.
        """
        hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
        vectors = (self._compute_pooling_weights(targets, hidden.dtype)[:, None] @ hidden).squeeze(1)
        for number, projection in enumerate(self.projections):
            inputs = functional.gelu(vectors) if number else vectors
            weight, bias = (projection.get_parameter(name).to(inputs.dtype) for name in ("weight", "bias"))
            vectors = functional.linear(inputs, weight, bias)
        return functional.normalize(vectors, dim=-1)

    def _compute_pooling_weights(self, targets: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the pooling weight of each token (texts, sequence).

        The weights of a text sum to 1, or to 0 if all its targets are IGNORE_INDEX.
        """
        valid = targets != IGNORE_INDEX
        positions = torch.arange(1, targets.shape[1] + 1, device=targets.device)
        if self._pooling is Pooling.last_token:
            return (valid & (positions == (positions * valid).amax(1, keepdim=True))).to(dtype)
        weights = (valid * (positions if self._pooling is Pooling.weighted_mean else 1)).to(dtype)
        return weights / weights.sum(1, keepdim=True).clamp_min(1)
