"""Rotary positions (Su et al. 2021, arXiv 2104.09864): pairs of dimensions turn by an angle that grows with the position.

So the product of a query and a key depends on how far apart they are, and on nothing else of their places.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from swarmtrain.config.transformer_architecture import PositionType, RotaryScalingConfig, TransformerArchitectureConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines for each position and dimension, 1 where nothing turns, and sines for each position and pair:
(sequence, …), or (batch, 1, sequence, …).
"""


class Rotary(nn.Module):
    """Angles of all positions. They are looked up once in a forward pass, for all layers."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        size, scaling = shape.rotary_dimensions, shape.rotary_scaling
        frequencies = shape.rotary_embedding_base ** -(torch.arange(0, size, 2, dtype=torch.float64) / max(1, size))
        frequencies = frequencies if scaling is None else _scaled(frequencies, scaling)
        angles = torch.outer(torch.arange(shape.sequence_length, dtype=torch.float64), frequencies)
        still = torch.ones(shape.sequence_length, shape.head_size - size)
        neighbours = shape.relative_position_embedding_type is PositionType.rotary_complex
        cosine = angles.cos().repeat_interleave(2, dim=1) if neighbours else angles.cos().repeat(1, 2)
        self.register_buffer("cosine", torch.cat((cosine.float(), still), dim=1), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def forward(self, length: int, first: Tensor | None = None) -> Rotation | None:
        """Return the rotation of `length` positions, None if nothing rotates.

        `first` (batch, sequence): for each token that of its document, which has position 0. None: that of the sample.
        """
        cosine, sine = self.get_buffer("cosine"), self.get_buffer("sine")
        if not sine.shape[1]:
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


def _scaled(frequencies: Tensor, how: RotaryScalingConfig) -> Tensor:
    """Return `frequencies`, in radians a place, for longer samples: Llama 3.1's way (Grattafiori et al. 2024, arXiv 2407.21783)."""
    turns = frequencies * how.original_sequence_length / (2 * math.pi)
    kept = (turns - how.low_frequency_factor) / (how.high_frequency_factor - how.low_frequency_factor)
    return torch.lerp(frequencies / how.factor, frequencies, kept.clamp(0, 1))


def rotate(heads: Tensor, rotation: Rotation, kind: PositionType) -> Tensor:
    """Return `heads` (batch, head, sequence, dimension), the first dimensions of each turned, two for an angle."""
    cosine, sine = (part.to(heads.dtype) for part in rotation)
    turned: Tensor = _Rotate.apply(heads, cosine, sine, kind)  # type: ignore[no-untyped-call]  # torch's own is not typed
    return turned


class _Rotate(torch.autograd.Function):
    """On the way back gradients are turned back. Left to itself torch keeps and adds the parts one by one: twice the time."""

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor, kind: PositionType) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.kind = kind
        return _turned(heads, cosine, sine, kind, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(gradient, cosine, sine, ctx.kind, -1), None, None, None


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor, kind: PositionType, direction: int) -> Tensor:
    turned, pairs = heads * cosine, sine.shape[-1]
    (to_first, to_second), (first, second) = (_pairs(values, pairs, kind) for values in (turned, heads))
    to_first.addcmul_(second, sine, value=-direction)
    to_second.addcmul_(first, sine, value=direction)
    return turned


def _pairs(heads: Tensor, pairs: int, kind: PositionType) -> tuple[Tensor, Tensor]:
    """Return the first and the second dimension of each pair."""
    if kind is PositionType.rotary_complex:
        return heads[..., : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
    return heads[..., :pairs], heads[..., pairs : 2 * pairs]
