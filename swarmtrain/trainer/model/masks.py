"""Attention masks: which tokens attend to which, and the kernels that apply them.

If every token attends to all tokens before it, no mask is built: kernels support that case directly, and it allows flash attention. A
window, or several documents in a sample, need a mask. It is built once per forward pass, for all layers: on a GPU as the blocks that flex
attention (Dong et al. 2024, arXiv 2412.05496) skips, elsewhere as booleans. Both are derived from one function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from swarmtrain.config.schema.transformer_architecture import Precision, TransformerArchitectureConfig

AttentionMask = Tensor | BlockMask | None
"""Booleans (batch or 1, 1, queries, keys), or a block mask for flex attention; None: plain causal attention."""
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps sample, head, query position and key position to whether the query attends to the key."""

_FLEX_MIN_HEAD_SIZE = 16
"""Smallest head size that flex attention's kernel supports."""
_FLEX_BLOCK_SIZE = 128
"""Queries per block of flex attention."""


class Masks(NamedTuple):
    """The attention masks of one forward pass."""

    full: AttentionMask
    """For heads that attend to everything before."""
    local: AttentionMask
    """For local heads."""


class AttentionOptions(NamedTuple):
    """How values are weighted."""

    dropout: float = 0.0
    """Fraction of the attention weights that is dropped."""
    scale: float | None = None
    """Factor of the products of queries and keys; None: one over the square root of the head size."""


_DEFAULT_OPTIONS = AttentionOptions()


def build_masks(
    architecture: TransformerArchitectureConfig,
    batch_size: int,
    length: int,
    documents: Tensor | None,
    device: torch.device,
    *,
    query_positions: Tensor | None = None,
) -> Masks:
    """Return the masks of one forward pass. If `documents` (batch, sequence) is given, tokens attend only within their document.

    `query_positions`: positions of the queries in their sequences; None if this rank has all of a sequence.
    """
    window = architecture.local_attention_window_size
    use_flex = device.type == "cuda" and architecture.head_size >= _FLEX_MIN_HEAD_SIZE and not architecture.dropout_attention_probs
    use_flex = use_flex and (query_positions is None or len(query_positions) >= _FLEX_BLOCK_SIZE)
    build_mask = _build_block_mask if use_flex and architecture.precision is not Precision.float64 else build_dense_mask
    mask_batch_size = batch_size if documents is not None else 1
    mask_size = length if query_positions is None else len(query_positions), length

    def make_mask(window_size: int | None) -> AttentionMask:
        return build_mask(
            _remap_query_positions(build_mask_mod(documents, window_size), query_positions), mask_batch_size, mask_size, device
        )

    full_mask = None if documents is None and query_positions is None else make_mask(None)
    return Masks(full_mask, None if window is None else make_mask(window))


def build_mask_mod(documents: Tensor | None, window: int | None) -> MaskMod:
    """Return the mask function: a token attends to itself and the tokens before it, of its document, at most `window` before it."""

    def mask_mod(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = query >= key
        if window is not None:
            visible = visible & (query - key <= window)
        if documents is not None:
            visible = visible & (documents[sample, query] == documents[sample, key])
        return visible

    return mask_mod


def build_dense_mask(mask_mod: MaskMod, batch_size: int, size: tuple[int, int], device: torch.device) -> Tensor:
    """Return `mask_mod` as booleans (samples, 1, queries, keys); `size` is (queries, keys)."""
    queries, keys = (torch.arange(count, device=device) for count in size)
    sample = torch.arange(batch_size, device=device)[:, None, None, None]
    return mask_mod(sample, torch.zeros_like(sample), queries[:, None], keys).expand(batch_size, 1, *size)


def _remap_query_positions(mask_mod: MaskMod, query_positions: Tensor | None) -> MaskMod:
    """Return `mask_mod` for local query indices, whose positions in their sequences are `query_positions`."""
    if query_positions is None:
        return mask_mod
    return lambda sample, head, query, key: mask_mod(sample, head, query_positions[query], key)


def compute_attention(query: Tensor, key: Tensor, value: Tensor, mask: AttentionMask, how: AttentionOptions = _DEFAULT_OPTIONS) -> Tensor:
    """Return the attention output (batch, head, sequence, dimension), shaped like `query`."""
    enable_gqa = key.shape[1] != query.shape[1]
    if isinstance(mask, BlockMask):
        attended: Tensor = _compile_cached(flex_attention)(query, key, value, block_mask=mask, scale=how.scale, enable_gqa=enable_gqa)
        return attended
    if enable_gqa and not _can_use_gqa(query, mask):
        repeats = query.shape[1] // key.shape[1]
        key, value, enable_gqa = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=how.dropout, is_causal=mask is None, scale=how.scale, enable_gqa=enable_gqa
    )


def _can_use_gqa(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether the kernel that torch will select supports grouped keys; otherwise torch falls back to one that stores all scores."""
    return query.device.type == "cpu" or (mask is None and query.dtype in (torch.float16, torch.bfloat16))


def _build_block_mask(mask_mod: MaskMod, batch_size: int, size: tuple[int, int], device: torch.device) -> BlockMask:
    return create_block_mask(mask_mod, batch_size, None, *size, device=device.type)


@cache
def _compile_cached(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
