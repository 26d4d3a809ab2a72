"""Attention by torch's flex attention (Dong et al. 2024, arXiv 2412.05496), which skips masked blocks.

Its kernel is compiled when it first runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from swarmtrain.trainer.model.attention.attention_method import AttentionOptions, AttentionProblem
from swarmtrain.trainer.model.attention.visibility import Visibility

_MIN_HEAD_SIZE = 16
"""Smallest head size that the kernel supports."""
BLOCK_SIZE = 128
"""Number of queries, and of keys, per block."""


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


class _BlockRanges(NamedTuple):
    """The smallest and the largest value in each block: (batch or 1, blocks)."""

    lowest: Tensor
    highest: Tensor


def build_block_mask(visibility: Visibility) -> BlockMask:
    """Return the block mask of `visibility`, computed block by block.

    torch's create_block_mask evaluates the mask function for every query and key: for a sample of 32,768 tokens this needs 10 GiB, or a
    compiler and a minute. Here only the range of positions and of document ids of each block is compared with that of each other block.

    A block without visible keys may be marked as partly visible, in which case attention evaluates the mask function for it.
    """
    query_count, key_count = visibility.query_count, visibility.key_count
    window_size, document_ids = visibility.window_size, visibility.document_ids
    positions, local_positions = torch.arange(key_count, device=visibility.device), visibility.compute_query_positions()
    queries, keys = _find_block_ranges(local_positions[None]), _find_block_ranges(positions[None])
    visible = queries.highest[:, :, None] >= keys.lowest[:, None]
    full = queries.lowest[:, :, None] >= keys.highest[:, None]
    if window_size is not None:
        visible &= queries.lowest[:, :, None] - keys.highest[:, None] <= window_size
        full &= queries.highest[:, :, None] - keys.lowest[:, None] <= window_size
    if document_ids is not None:
        query_documents, key_documents = _find_block_ranges(document_ids[:, local_positions]), _find_block_ranges(document_ids)
        visible = visible & (query_documents.highest[:, :, None] >= key_documents.lowest[:, None])
        visible &= query_documents.lowest[:, :, None] <= key_documents.highest[:, None]
        full = full & (query_documents.highest[:, :, None] == key_documents.lowest[:, None])
        full &= query_documents.lowest[:, :, None] == key_documents.highest[:, None]
    # The last block may extend beyond the sequence.
    full[:, query_count // BLOCK_SIZE :] = False
    full[:, :, key_count // BLOCK_SIZE :] = False
    block_mask: BlockMask = BlockMask.from_kv_blocks(
        *_list_blocks(visible & ~full),
        *_list_blocks(full),
        BLOCK_SIZE,
        mask_mod=visibility.build_mask_mod(),
        seq_lengths=(query_count, key_count),
    )
    return block_mask


def _find_block_ranges(values: Tensor) -> _BlockRanges:
    """Return the ranges of `values` (batch or 1, tokens) in each block. An incomplete block is filled up with its last value."""
    missing = -values.shape[1] % BLOCK_SIZE
    blocks = torch.cat((values, values[:, -1:].expand(-1, missing)), 1).view(len(values), -1, BLOCK_SIZE)
    return _BlockRanges(*blocks.aminmax(dim=2))


def _list_blocks(selected: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each block of queries the number of selected blocks of keys, and their indices, in front of all other indices."""
    indices = torch.argsort(selected.to(torch.int8), dim=-1, descending=True, stable=True)
    return selected.sum(-1, dtype=torch.int32)[:, None], indices.to(torch.int32)[:, None]
