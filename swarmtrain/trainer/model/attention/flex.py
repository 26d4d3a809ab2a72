"""Attention by torch's flex attention (Dong et al. 2024, arXiv 2412.05496), which skips masked blocks.

Its kernel is compiled when it first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from swarmtrain.trainer.model.attention.attention_method import AttentionOptions, AttentionProblem
from swarmtrain.trainer.model.attention.block_mask import BLOCK_SIZE, build_block_mask

_MIN_HEAD_SIZE = 16
"""Smallest head size that the kernel supports."""


@dataclass(frozen=True)
class FlexAttention:
    """Attention with a mask of blocks."""

    block_mask: BlockMask

    @classmethod
    def supports(cls, problem: AttentionProblem) -> bool:
        architecture = problem.architecture
        return (
            problem.device_type == "cuda"
            and problem.dtype is not torch.float64
            and problem.visibility.query_count >= BLOCK_SIZE
            and architecture.head_size >= _MIN_HEAD_SIZE
            and not architecture.dropout_attention_probs
        )

    @classmethod
    def from_problem(cls, problem: AttentionProblem) -> Self:
        return cls(build_block_mask(problem.visibility))

    def compute(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        attended: Tensor = _compile_once(flex_attention)(
            query,
            key,
            value,
            score_mod=None if options.softcap is None else _build_score_mod(options.softcap),
            block_mask=self.block_mask,
            scale=options.scale,
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return attended


@cache
def _compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


@cache
def _build_score_mod(softcap: float) -> Callable[..., Tensor]:
    """Return the function that soft-caps scores. Cached, since the kernel is compiled for each function object."""

    def cap_score(score: Tensor, _sample: Tensor, _head: Tensor, _query: Tensor, _key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap_score
