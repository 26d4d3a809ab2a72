"""Interface of attention methods: ways to compute attention, each with its own kernel and form of mask."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.attention.visibility import Visibility


class AttentionOptions(NamedTuple):
    """Options of the attention function."""

    dropout: float = 0.0
    """Dropout probability of the attention weights."""
    scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head size)."""
    softcap: float | None = None
    """Bound c of the attention scores s, which become c tanh(s / c); None: no bound."""


class AttentionProblem(NamedTuple):
    """What an attention method has to compute, and where."""

    visibility: Visibility
    architecture: TransformerArchitectureConfig
    dtype: torch.dtype
    """Data type of queries, keys and values."""
    device_type: str
    """Type of the device whose kernels are used, such as "cuda". A simulation on a CPU can choose those of another device."""


class AttentionMethod(Protocol):
    """Interface of an attention method. An instance holds the mask of one forward pass, for all layers."""

    @classmethod
    def supports(cls, problem: AttentionProblem) -> bool:
        """Return whether this method can solve `problem`."""

    @classmethod
    def from_problem(cls, problem: AttentionProblem) -> Self:
        """Build the mask. Called only if the problem is supported."""

    def compute(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Return the attention output (batch, head, queries, head size), with the shape of `query`.

        `key` and `value` (batch, head, keys, head size) may have fewer heads than `query` (GQA).
        """
