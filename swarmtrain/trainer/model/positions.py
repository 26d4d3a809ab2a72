"""Learned positions (Radford et al. 2019): a vector for each place in the sample, added to its token's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig


class Positions(nn.Module):
    """The vectors of all places."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.sequence_length, shape.hidden_size))

    def forward(self, hidden: Tensor, places: Tensor | None) -> Tensor:
        """Return `hidden` (batch, sequence, dimension) with those of `places` (sequence), or (batch, sequence), added."""
        return hidden + self.weight[places]
