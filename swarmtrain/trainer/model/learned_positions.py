"""Learned position embeddings (Radford et al. 2019): one vector per position in the sample is added to the token embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig


class LearnedPositions(nn.Module):
    """Table of position embeddings (sequence length, hidden size)."""

    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(architecture.sequence_length, architecture.hidden_size))

    def forward(self, hidden: Tensor, positions: Tensor | None) -> Tensor:
        """Return `hidden` (batch, sequence, hidden size) plus the embeddings of `positions`, (sequence) or (batch, sequence)."""
        return hidden + self.weight[positions]
