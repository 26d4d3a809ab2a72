"""Position embeddings: rotary (Su et al. 2021, arXiv 2104.09864) and learned (Radford et al. 2019).

With rotary embeddings, pairs of dimensions are rotated by an angle proportional to the token's position. So the dot product of a query and
a key depends on the distance between their positions, not on the absolute positions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.transformer_architecture import PositionType, RotaryScalingConfig, TransformerArchitectureConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines per position and dimension (1 for dimensions that are not rotated), and sines per position and pair of dimensions.

Shapes: (sequence, …) or (batch, 1, sequence, …).
"""


class RotaryEmbedding(nn.Module):
    """Tables of the cosines and sines for all positions. They are looked up once per forward pass, for all layers."""

    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        super().__init__()
        rotary_size, scaling = architecture.rotary_dimensions, architecture.rotary_scaling
        frequencies = architecture.rotary_embedding_base ** -(torch.arange(0, rotary_size, 2, dtype=torch.float64) / max(1, rotary_size))
        frequencies = frequencies if scaling is None else _scale_frequencies(frequencies, scaling)
        angles = torch.outer(torch.arange(architecture.sequence_length, dtype=torch.float64), frequencies)
        unrotated = torch.ones(architecture.sequence_length, architecture.head_size - rotary_size)
        is_interleaved = architecture.relative_position_embedding_type is PositionType.rotary_complex
        cosine = angles.cos().repeat_interleave(2, dim=1) if is_interleaved else angles.cos().repeat(1, 2)
        self.register_buffer("cosine", torch.cat((cosine.float(), unrotated), dim=1), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def forward(self, length: int, dtype: torch.dtype, document_starts: Tensor | None = None) -> Rotation | None:
        """Return the rotation for `length` positions in `dtype`, or None if no dimension is rotated.

        `document_starts` (batch, sequence): for each token the position in the sample of its document's first token; positions are then
        relative to it. None: positions are counted from the start of the sample.
        """
        cosine, sine = self.get_buffer("cosine"), self.get_buffer("sine")
        if not sine.shape[1]:
            return None
        cosine, sine = cosine[:length].to(dtype), sine[:length].to(dtype)
        if document_starts is None:
            return cosine, sine
        positions = torch.arange(length, device=document_starts.device) - document_starts
        return cosine[positions].unsqueeze(1), sine[positions].unsqueeze(1)


def find_document_starts(documents: Tensor) -> Tensor:
    """Return for each token (batch, sequence) the position in the sample of the first token of its document."""
    positions = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    same_document = torch.zeros_like(documents, dtype=torch.bool)
    same_document[:, 1:] = documents[:, 1:] == documents[:, :-1]
    return positions.masked_fill(same_document, 0).cummax(1).values


def _scale_frequencies(frequencies: Tensor, scaling: RotaryScalingConfig) -> Tensor:
    """Return `frequencies`, in radians per position, scaled for sequences longer than those of pretraining.

    The method is that of Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783).
    """
    rotations = frequencies * scaling.original_sequence_length / (2 * math.pi)
    unscaled_weight = (rotations - scaling.low_frequency_factor) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
    return torch.lerp(frequencies / scaling.factor, frequencies, unscaled_weight.clamp(0, 1))


class LearnedPositions(nn.Module):
    """Table of learned position embeddings (sequence length, hidden size): one vector per position is added to the token embedding."""

    def __init__(self, architecture: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(architecture.sequence_length, architecture.hidden_size))

    def forward(self, hidden: Tensor, positions: Tensor | None) -> Tensor:
        """Return `hidden` (batch, sequence, hidden size) plus the embeddings of `positions`, (sequence) or (batch, sequence)."""
        return hidden + self.weight[positions]


def apply_rotary_embedding(heads: Tensor, rotation: Rotation, position_type: PositionType) -> Tensor:
    """Return `heads` (batch, head, sequence, head size) with the rotary dimensions of each head rotated by `rotation`, in their type.

    `position_type` determines which dimensions form a pair: neighbors (0 and 1), or the same index in both halves of the head.
    """
    rotated: Tensor = _ApplyRotary.apply(heads, *rotation, position_type)  # type: ignore[no-untyped-call]  # not typed in torch
    return rotated


class _ApplyRotary(torch.autograd.Function):
    """Rotation as one autograd function: the backward pass rotates gradients by the negative angle.

    Autograd over the separate operations would take twice the time.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, cosine: Tensor, sine: Tensor, position_type: PositionType) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.position_type = position_type
        return _rotate_dimension_pairs(heads, cosine, sine, position_type, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate_dimension_pairs(gradient, cosine, sine, ctx.position_type, -1), None, None, None


def _rotate_dimension_pairs(heads: Tensor, cosine: Tensor, sine: Tensor, position_type: PositionType, direction: int) -> Tensor:
    rotated, pairs = heads * cosine, sine.shape[-1]
    (first_output, second_output), (first, second) = (_split_dimension_pairs(values, pairs, position_type) for values in (rotated, heads))
    first_output.addcmul_(second, sine, value=-direction)
    second_output.addcmul_(first, sine, value=direction)
    return rotated


def _split_dimension_pairs(heads: Tensor, pairs: int, position_type: PositionType) -> tuple[Tensor, Tensor]:
    """Return the first dimension of each pair, and the second one, as views of `heads`: (…, pairs) each."""
    if position_type is PositionType.rotary_complex:
        return heads[..., : 2 * pairs : 2], heads[..., 1 : 2 * pairs : 2]
    return heads[..., :pairs], heads[..., pairs : 2 * pairs]
