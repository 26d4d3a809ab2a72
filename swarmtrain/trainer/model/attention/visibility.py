"""Which tokens attend to which: the description from which each attention method derives its mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Mask function: maps the indices of sample, head, query and key to whether the query attends to the key."""


@dataclass(frozen=True)
class Visibility:
    """A token attends to itself and to earlier tokens of its document, at most `window_size` positions back."""

    batch_size: int
    key_count: int
    """Number of keys per sample: the length of the full sequences."""
    device: torch.device
    document_ids: Tensor | None = None
    """Document id of each token (batch, keys). The tokens of a document are adjacent. None: a sample is one document."""
    window_size: int | None = None
    """None: no limit."""
    query_ranges: tuple[range, ...] | None = None
    """Positions of this rank's queries in their sequences, if it does not have the queries of full sequences."""

    @property
    def is_causal(self) -> bool:
        """Whether each query attends to all tokens up to its own: the mask that all attention kernels support."""
        return self.document_ids is None and self.window_size is None and self.query_ranges is None

    @property
    def ranges(self) -> tuple[range, ...]:
        """Positions of the queries in their sequences."""
        return (range(self.key_count),) if self.query_ranges is None else self.query_ranges

    @property
    def query_count(self) -> int:
        """Number of queries per sample."""
        return sum(len(positions) for positions in self.ranges)

    @property
    def mask_batch_size(self) -> int:
        """Number of different masks: without documents, all samples have the same one."""
        return 1 if self.document_ids is None else self.batch_size

    def compute_query_positions(self) -> Tensor:
        """Return the positions of the queries in their sequences (queries)."""
        parts = [torch.arange(each.start, each.stop, device=self.device) for each in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def build_mask_mod(self) -> MaskMod:
        """Return the mask function, for indices of this rank's queries."""
        document_ids, window_size = self.document_ids, self.window_size
        positions = None if self.query_ranges is None else self.compute_query_positions()

        def mask_mod(batch_index: Tensor, _head_index: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
            position = query_index if positions is None else positions[query_index]
            visible = position >= key_index
            if window_size is not None:
                visible = visible & (position - key_index <= window_size)
            if document_ids is not None:
                visible = visible & (document_ids[batch_index, position] == document_ids[batch_index, key_index])
            return visible

        return mask_mod

    def find_visible_keys(self, queries: range) -> range:
        """Return the range of keys outside of which none is visible to these `queries` (indices of this rank's queries)."""
        first_index, positions = 0, []
        for each in self.ranges:
            selected = range(max(queries.start, first_index), min(queries.stop, first_index + len(each)))
            if selected:
                positions += [each[selected.start - first_index], each[selected.stop - 1 - first_index]]
            first_index += len(each)
        return range(0 if self.window_size is None else max(0, min(positions) - self.window_size), max(positions) + 1)

    def build_dense_mask(self, queries: range | None = None, keys: range | None = None) -> Tensor:
        """Return the mask as a boolean tensor (batch or 1, 1, queries, keys). `queries`, `keys`: indices to select; None: all."""
        queries, keys = queries or range(self.query_count), keys or range(self.key_count)
        query_index, key_index = (torch.arange(each.start, each.stop, device=self.device) for each in (queries, keys))
        sample = torch.arange(self.mask_batch_size, device=self.device)[:, None, None, None]
        visible = self.build_mask_mod()(sample, torch.zeros_like(sample), query_index[:, None], key_index)
        return visible.expand(self.mask_batch_size, 1, len(queries), len(keys))
