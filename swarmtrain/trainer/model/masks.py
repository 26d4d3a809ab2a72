"""Which tokens see which, and the kernels that know.

Where every token sees all before it, no mask is made: kernels know that case, and flash attention is for it. A window
or documents within a sample need one. It is made once in a forward pass, for all layers: on a GPU as the blocks that
flex attention (Dong et al. 2024, arXiv 2412.05496) leaves out, elsewhere as truth values. Both come of one function.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from swarmtrain.config.transformer_architecture import Precision, TransformerArchitectureConfig

Mask = Tensor | BlockMask | None
"""Truth values (batch or 1, 1, queries, keys), or the same for flex attention; None: all tokens before."""
Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Maps sample, head, query's place and key's place to whether the one sees the other."""

_SMALLEST = 16
"""Dimensions of a head that flex attention's kernel needs."""
_FEW = 128
"""Queries that make a block of it."""


class Masks(NamedTuple):
    """What heads see in one forward pass."""

    all: Mask
    """Heads that see everything before."""
    near: Mask
    """Local heads."""


class Mixing(NamedTuple):
    """How values are weighted."""

    dropout: float = 0.0
    """Part of the weights that is dropped."""
    scale: float | None = None
    """What products of queries and keys are multiplied by; None: one over the root of a head's size."""


_USUAL = Mixing()


def build(
    shape: TransformerArchitectureConfig,
    batch: int,
    length: int,
    documents: Tensor | None,
    device: torch.device,
    *,
    places: Tensor | None = None,
) -> Masks:
    """Return the masks of one forward pass. `documents` (batch, sequence) are not to see each other, if given.

    `places`: those of the queries in their sequences; None if all of a sequence's are here.
    """
    window = shape.local_attention_window_size
    flex = device.type == "cuda" and shape.head_size >= _SMALLEST and not shape.dropout_attention_probs
    flex = flex and (places is None or len(places) >= _FEW)
    make = _blocks if flex and shape.precision is not Precision.float64 else truth
    samples = batch if documents is not None else 1
    size = length if places is None else len(places), length

    def made(near: int | None) -> Mask:
        return make(_moved(sees(documents, near), places), samples, size, device)

    everything = None if documents is None and places is None else made(None)
    return Masks(everything, None if window is None else made(window))


def sees(documents: Tensor | None, window: int | None) -> Sees:
    """Return what one token sees: those before it and itself, of its own document, at most `window` before it."""

    def mask(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = query >= key
        if window is not None:
            seen = seen & (query - key <= window)
        if documents is not None:
            seen = seen & (documents[sample, query] == documents[sample, key])
        return seen

    return mask


def truth(seen: Sees, samples: int, size: tuple[int, int], device: torch.device) -> Tensor:
    """Return `seen` as truth values (samples, 1, queries, keys); `size` is that of the last two."""
    queries, keys = (torch.arange(count, device=device) for count in size)
    sample = torch.arange(samples, device=device)[:, None, None, None]
    return seen(sample, torch.zeros_like(sample), queries[:, None], keys).expand(samples, 1, *size)


def _moved(seen: Sees, places: Tensor | None) -> Sees:
    """Return `seen` for queries that are numbered here, and have `places` in their sequences."""
    if places is None:
        return seen
    return lambda sample, head, query, key: seen(sample, head, places[query], key)


def mix(query: Tensor, key: Tensor, value: Tensor, mask: Mask, how: Mixing = _USUAL) -> Tensor:
    """Return the values that each query sees, weighted: (batch, head, sequence, dimension) like `query`."""
    shared = key.shape[1] != query.shape[1]
    if isinstance(mask, BlockMask):
        mixed: Tensor = _compiled(flex_attention)(query, key, value, block_mask=mask, scale=how.scale, enable_gqa=shared)
        return mixed
    if shared and not _takes_groups(query, mask):
        repeats = query.shape[1] // key.shape[1]
        key, value, shared = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1), False
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=how.dropout, is_causal=mask is None, scale=how.scale, enable_gqa=shared
    )


def _takes_groups(query: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel that torch will choose reads keys that are shared; others fall back to one that keeps all scores."""
    return query.device.type == "cpu" or (mask is None and query.dtype in (torch.float16, torch.bfloat16))


def _blocks(seen: Sees, samples: int, size: tuple[int, int], device: torch.device) -> BlockMask:
    return create_block_mask(seen, samples, None, *size, device=device.type)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
