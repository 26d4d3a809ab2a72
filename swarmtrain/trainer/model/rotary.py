"""Rotary positions (Su et al. 2021, arXiv 2104.09864): pairs of dimensions turn by an angle that grows with the position.

So the product of a query and a key depends on how far apart they are, and on nothing else of their places.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swarmtrain.config.transformer_architecture import PositionType, TransformerArchitectureConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, for each position and pair: (sequence, pairs), or (batch, 1, sequence, pairs)."""


class Rotary(nn.Module):
    """Angles of all positions. They are looked up once in a forward pass, for all layers."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        size = shape.rotary_dimensions
        frequencies = shape.rotary_embedding_base ** -(torch.arange(0, size, 2, dtype=torch.float64) / max(1, size))
        angles = torch.outer(torch.arange(shape.sequence_length, dtype=torch.float64), frequencies)
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def forward(self, length: int, first: Tensor | None = None) -> Rotation | None:
        """Return the rotation of `length` positions, None if nothing rotates.

        `first` (batch, sequence): for each token that of its document, which has position 0. None: that of the sample.
        """
        cosine, sine = self.get_buffer("cosine"), self.get_buffer("sine")
        if not cosine.shape[1]:
            return None
        if first is None:
            return cosine[:length], sine[:length]
        positions = torch.arange(length, device=first.device) - first
        return cosine[positions].unsqueeze(1), sine[positions].unsqueeze(1)


def starts(documents: Tensor) -> Tensor:
    """Return for each token (batch, sequence) the place of the first one of its document."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    same = torch.zeros_like(documents, dtype=torch.bool)
    same[:, 1:] = documents[:, 1:] == documents[:, :-1]
    return places.masked_fill(same, 0).cummax(1).values


def rotate(heads: Tensor, rotation: Rotation, kind: PositionType) -> Tensor:
    """Return `heads` (batch, head, sequence, dimension), the first dimensions of each turned, two for an angle."""
    cosine, sine = (part.to(heads.dtype) for part in rotation)
    turning = 2 * cosine.shape[-1]
    rest = heads[..., turning:]
    if kind is PositionType.rotary_complex:
        first, second = heads[..., :turning:2], heads[..., 1:turning:2]
        turned = torch.stack((first * cosine - second * sine, second * cosine + first * sine), dim=-1).flatten(-2)
    else:
        first, second = heads[..., :turning].chunk(2, dim=-1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
