"""Block masks for flex attention (Dong et al. 2024, arXiv 2412.05496), computed block by block.

torch's create_block_mask evaluates the mask function for every query and key: for a sample of 32,768 tokens this needs 10 GiB, or a
compiler and a minute. Here only the range of positions and of document ids of each block is compared with that of each other block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from swarmtrain.trainer.model.attention.visibility import Visibility

BLOCK_SIZE = 128
"""Number of queries, and of keys, per block."""


class _BlockRanges(NamedTuple):
    """The smallest and the largest value in each block: (batch or 1, blocks)."""

    lowest: Tensor
    highest: Tensor


def build_block_mask(visibility: Visibility) -> BlockMask:
    """Return the block mask of `visibility`.

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
