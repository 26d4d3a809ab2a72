"""Attention methods that work for all models on all devices: torch's scaled_dot_product_attention (SDPA), without or with a mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from swarmtrain.trainer.model.attention.attention_method import AttentionOptions, AttentionProblem
from swarmtrain.trainer.model.attention.visibility import Visibility

_MAX_BYTES = 1 << 26
"""Size of the largest mask, or with soft-capping of the largest matrix of scores, that is in memory at a time."""
_SCORE_BYTES = 4


class CausalAttention:
    """Attention to all tokens up to the query's own. Kernels need no mask for it."""

    @classmethod
    def supports(cls, problem: AttentionProblem) -> bool:
        return problem.visibility.is_causal and problem.architecture.attention_softcap is None

    @classmethod
    def from_problem(cls, _problem: AttentionProblem) -> Self:
        return cls()

    def compute(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return _run_sdpa(query, key, value, None, options)


@dataclass(frozen=True)
class DenseAttention:
    """Attention with a boolean mask.

    If the mask is larger than 64 MiB, attention is computed for some of the queries at a time, and again in the backward pass, so that
    only the mask of these queries is in memory. Keys outside the window are then skipped. The same applies to the scores if they are
    soft-capped, which no kernel of SDPA supports.
    """

    visibility: Visibility
    mask: Tensor | None
    """The mask of all queries (batch or 1, 1, queries, keys); None if it is too large."""

    @classmethod
    def supports(cls, _problem: AttentionProblem) -> bool:
        return True

    @classmethod
    def from_problem(cls, problem: AttentionProblem) -> Self:
        visibility = problem.visibility
        is_small = visibility.mask_batch_size * visibility.query_count * visibility.key_count <= _MAX_BYTES
        return cls(visibility, visibility.build_dense_mask() if is_small else None)

    def compute(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        count = query.shape[2]
        per_query = query.shape[0] * query.shape[1] * _SCORE_BYTES if options.softcap else self.visibility.mask_batch_size
        at_once = max(1, _MAX_BYTES // max(1, per_query * key.shape[2]))
        if count <= at_once and self.mask is not None:
            return _compute_masked_attention(query, key, value, self.mask, options)
        parts = [range(start, min(start + at_once, count)) for start in range(0, count, at_once)]
        outputs: list[Tensor] = [
            checkpoint(self._compute_part, query[:, :, part.start : part.stop], key, value, part, options, use_reentrant=False)
            for part in parts
        ]
        return torch.cat(outputs, dim=2)

    def _compute_part(self, query: Tensor, key: Tensor, value: Tensor, queries: range, options: AttentionOptions) -> Tensor:
        """Return the attention output of `query`, which has only the queries with the indices `queries`."""
        keys = self.visibility.find_visible_keys(queries)
        mask = self.visibility.build_dense_mask(queries, keys)
        key, value = (heads[:, :, keys.start : keys.stop] for heads in (key, value))
        return _compute_masked_attention(query, key, value, mask, options)


def _compute_masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions) -> Tensor:
    """Return the attention output, with all scores in memory if they are soft-capped (Gemma 2: Gemma Team 2024, arXiv 2408.00118)."""
    if options.softcap is None:
        return _run_sdpa(query, key, value, mask, options)
    scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
    # (batch, key head, query heads per key head, queries, head size)
    grouped = query.reshape(len(query), key.shape[1], -1, *query.shape[2:])
    scores = (grouped @ key.unsqueeze(2).mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    scores = options.softcap * torch.tanh(scores / options.softcap)
    weights = scores.masked_fill(~mask.unsqueeze(2), -torch.inf).softmax(-1).to(query.dtype)
    if options.dropout:
        weights = functional.dropout(weights, options.dropout)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def _run_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    enable_gqa = key.shape[1] != query.shape[1]
    if enable_gqa and not _can_use_gqa(query, mask):
        repeats = query.shape[1] // key.shape[1]
        key, value, enable_gqa = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=options.dropout, is_causal=mask is None, scale=options.scale, enable_gqa=enable_gqa
    )


def _can_use_gqa(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether torch will select a kernel that supports grouped-query attention.

    The fallback kernel would materialize all attention scores.
    """
    return query.device.type == "cpu" or (mask is None and query.dtype in (torch.float16, torch.bfloat16))
