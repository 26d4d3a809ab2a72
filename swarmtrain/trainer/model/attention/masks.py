"""Attention masks, and the attention kernels that apply them.

Plain causal attention needs no mask tensor: kernels support it directly, including flash attention. A local (sliding) window, or several
documents in one sample, need a mask. It is built once per forward pass for all layers: on a GPU as a block mask for flex attention (Dong
et al. 2024, arXiv 2412.05496), which skips masked blocks; on other devices as a boolean tensor. Both are derived from the same mask
function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig
from swarmtrain.trainer.model.attention.block_mask import BLOCK_SIZE, MaskMod, build_block_mask

AttentionMask = Tensor | BlockMask | None
"""Boolean mask (batch or 1, 1, queries, keys), or a block mask for flex attention. None: plain causal attention."""
_FLEX_MIN_HEAD_SIZE = 16
"""Smallest head size that flex attention's kernel supports."""


class Masks(NamedTuple):
    """The attention masks of one forward pass, for heads with full attention and for heads with local attention."""

    full: AttentionMask
    """Mask for heads that attend to all earlier tokens."""
    local: AttentionMask
    """Mask for heads that attend to a local (sliding) window."""


class AttentionOptions(NamedTuple):
    """Options of the attention function: dropout of attention weights, and scale of attention scores."""

    dropout: float = 0.0
    """Dropout probability of the attention weights."""
    scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(head size)."""


_DEFAULT_OPTIONS = AttentionOptions()


def build_masks(
    architecture: TransformerArchitectureConfig,
    batch_size: int,
    sequence_length: int,
    document_ids: Tensor | None,
    device: torch.device,
    *,
    query_positions: Tensor | None = None,
) -> Masks:
    """Return the attention masks of one forward pass for sequences of `sequence_length` tokens.

    `document_ids` (batch, sequence): the document id of each token; tokens attend only within their document. None: tokens
    also attend to other documents.
    `query_positions`: positions of this rank's queries in their sequences (context parallelism); None if this rank has full
    sequences.
    """
    window = architecture.local_attention_window_size
    query_count = sequence_length if query_positions is None else len(query_positions)
    use_flex = device.type == "cuda" and architecture.head_size >= _FLEX_MIN_HEAD_SIZE and not architecture.dropout_attention_probs
    use_flex = use_flex and query_count >= BLOCK_SIZE and architecture.precision is not Precision.float64
    mask_size = query_count, sequence_length

    def make_mask(window_size: int | None) -> AttentionMask:
        mask_mod = _remap_query_positions(build_mask_mod(document_ids, window_size), query_positions)
        if use_flex:
            return build_block_mask(
                mask_mod, mask_size, device, document_ids=document_ids, window_size=window_size, query_positions=query_positions
            )
        return build_dense_mask(mask_mod, 1 if document_ids is None else batch_size, mask_size, device)

    full_mask = None if document_ids is None and query_positions is None else make_mask(None)
    return Masks(full_mask, None if window is None else make_mask(window))


def build_mask_mod(document_ids: Tensor | None, window_size: int | None) -> MaskMod:
    """Return the mask function: a token attends to itself and to earlier tokens of its document, at most `window_size` positions back.

    `document_ids` (batch, sequence): the document id of each token; None: all tokens of a sample belong to one document. `window_size`
    None: no limit.
    """

    def mask_mod(batch_index: Tensor, _head_index: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
        visible = query_index >= key_index
        if window_size is not None:
            visible = visible & (query_index - key_index <= window_size)
        if document_ids is not None:
            visible = visible & (document_ids[batch_index, query_index] == document_ids[batch_index, key_index])
        return visible

    return mask_mod


def build_dense_mask(mask_mod: MaskMod, batch_size: int, size: tuple[int, int], device: torch.device) -> Tensor:
    """Return `mask_mod` as a boolean tensor (batch, 1, queries, keys); `size` is (queries, keys)."""
    queries, keys = (torch.arange(count, device=device) for count in size)
    sample = torch.arange(batch_size, device=device)[:, None, None, None]
    return mask_mod(sample, torch.zeros_like(sample), queries[:, None], keys).expand(batch_size, 1, *size)


def _remap_query_positions(mask_mod: MaskMod, query_positions: Tensor | None) -> MaskMod:
    """Return `mask_mod` for local query indices: query i of this rank is at position `query_positions[i]` of its sequence."""
    if query_positions is None:
        return mask_mod
    return lambda sample, head, query, key: mask_mod(sample, head, query_positions[query], key)


def compute_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, options: AttentionOptions = _DEFAULT_OPTIONS
) -> Tensor:
    """Return the attention output (batch, head, sequence, head size), with the shape of `query`.

    `key` and `value` may have fewer heads than `query` (GQA).
    """
    enable_gqa = key.shape[1] != query.shape[1]
    if isinstance(mask, BlockMask):
        attended: Tensor = _compile_function_cached(flex_attention)(
            query, key, value, block_mask=mask, scale=options.scale, enable_gqa=enable_gqa
        )
        return attended
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


@cache
def _compile_function_cached(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
