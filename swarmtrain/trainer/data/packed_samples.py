"""Packed samples: each sample contains complete documents. A document is split only if it is longer than a sample.

A document of n tokens has n - 1 inputs, each with the next token as its target. The last token of a document is only a target, and no
target crosses a document boundary. A document longer than a sample fills one or more samples alone, and its remainder is packed like a
short document.

Packing is best-fit decreasing: the longest documents first, each into the fullest sample with enough space (Ding et al. 2024, arXiv
2404.10830). All documents of the same length are packed at once, so the number of iterations depends on the number of different lengths,
not on the number of documents. A sample of packed documents is called a pack.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.sample_index import TokenSpans


class PackedSamples:
    """Index of the packed samples of one token file.

    The sample index uses 22 bytes of memory per document. The constructor reads the whole document index.
    """

    target_shift = 1

    def __init__(self, token_file: MemoryMap, sequence_length: int) -> None:
        starts, input_counts = token_file.documents[:, 0], np.maximum(token_file.documents[:, 1].astype(np.int64) - 1, 0)
        full_counts = input_counts // sequence_length
        self._sequence_length = sequence_length
        self._full_documents = np.repeat(np.arange(len(full_counts), dtype=np.int32), full_counts)
        """For each sample that a single document fills: the index of this document."""
        self._first_full_sample = np.cumsum(full_counts) - full_counts
        self._starts = starts
        partial_documents = np.flatnonzero(input_counts % sequence_length)
        packs = pack_items_best_fit((input_counts % sequence_length)[partial_documents], sequence_length)
        order = np.argsort(packs, kind="stable")
        self._packed_documents = partial_documents[order].astype(np.int32)
        """Indices of the documents whose remainder is packed, sorted by pack."""
        self._pack_ends = np.flatnonzero(np.diff(packs[order], append=-1)) + 1
        self._input_counts = input_counts

    def __len__(self) -> int:
        return len(self._full_documents) + len(self._pack_ends)

    def count_targets(self, sample_ids: Ids) -> Ids:
        """Return the number of targets of each of the samples `sample_ids`, as an int64 array."""
        spans = self.locate_token_spans(sample_ids)
        return np.bincount(spans.row, spans.count, minlength=len(sample_ids)).astype(np.int64)

    def locate_token_spans(self, sample_ids: Ids) -> TokenSpans:
        """Return the token spans of the samples `sample_ids` in the token file."""
        rows, packed_documents = self._list_packed_documents(sample_ids)
        remainders = self._input_counts[packed_documents] % self._sequence_length
        full_rows = np.flatnonzero(sample_ids < len(self._full_documents))
        documents = self._full_documents[sample_ids[full_rows]]
        offsets = (sample_ids[full_rows] - self._first_full_sample[documents]) * self._sequence_length
        row = np.concatenate([full_rows, rows])
        start = np.concatenate(
            [self._starts[documents] + offsets, self._starts[packed_documents] + self._input_counts[packed_documents] - remainders]
        )
        count = np.concatenate([np.full_like(full_rows, self._sequence_length), remainders])
        return TokenSpans(row, _compute_span_columns(row, count), start, count)

    def find_document_starts(self, sample_ids: Ids) -> tuple[Ids, Ids]:
        """Return the rows (indices in `sample_ids`) and columns at which documents begin, except in column 0."""
        spans = self.locate_token_spans(sample_ids)
        is_not_first = spans.column > 0
        return spans.row[is_not_first], spans.column[is_not_first]

    def _list_packed_documents(self, sample_ids: Ids) -> tuple[Ids, Ids]:
        """Return for every document in a pack of `sample_ids` its row (index of the pack in `sample_ids`) and its document index."""
        rows = np.flatnonzero(sample_ids >= len(self._full_documents))
        packs = sample_ids[rows] - len(self._full_documents)
        ends = self._pack_ends[packs]
        counts = ends - np.where(packs, self._pack_ends[packs - 1], 0)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(rows, counts), self._packed_documents[np.repeat(ends - counts, counts) + within]


def pack_items_best_fit(sizes: Ids, capacity: int) -> Ids:
    """Return the pack index of each item of `sizes` (1 to `capacity`), by best-fit decreasing into packs of size `capacity`."""
    packs = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    packs_by_space: dict[int, list[Ids]] = defaultdict(list)
    count = 0
    if not len(sizes):
        return packs
    lengths, firsts = np.unique(-sizes[order], return_index=True)
    for size, items in zip((-lengths).tolist(), np.split(order, firsts[1:]), strict=True):
        remaining = items
        for space in sorted(space for space in packs_by_space if space >= size):
            if not len(remaining):
                break
            remaining = _fill_packs(packs, remaining, size, (space, np.concatenate(packs_by_space.pop(space))), packs_by_space)
        if len(remaining):
            new_count = -(-len(remaining) // (capacity // size))
            _fill_packs(packs, remaining, size, (capacity, np.arange(count, count + new_count)), packs_by_space)
            count += new_count
    return packs


def _fill_packs(
    pack_by_item: Ids, items: Ids, item_size: int, packs_with_space: tuple[int, Ids], packs_by_space: dict[int, list[Ids]]
) -> Ids:
    """Put as many of `items`, all of the same `item_size`, as possible into `packs_with_space`. Return the remaining items.

    `packs_with_space`: the free space, equal in all these packs, and their indices. `pack_by_item` (pack index of each item) and
    `packs_by_space` (indices of the other packs, by free space) are updated.
    """
    space, bins = packs_with_space
    per_pack = space // item_size
    placed = min(len(items), per_pack * len(bins))
    pack_by_item[items[:placed]] = np.repeat(bins, per_pack)[:placed]
    full_count, leftover = divmod(placed, per_pack)
    for used, chosen in (
        (per_pack, bins[:full_count]),
        (leftover, bins[full_count : full_count + bool(leftover)]),
        (0, bins[full_count + bool(leftover) :]),
    ):
        if len(chosen) and space - used * item_size:
            packs_by_space[space - used * item_size].append(chosen)
    return items[placed:]


def _compute_span_columns(span_rows: Ids, span_lengths: Ids) -> Ids:
    """Return the column at which each span begins: after all earlier spans of the same row. `span_lengths`: length of each span."""
    order = np.argsort(span_rows, kind="stable")
    before = np.cumsum(span_lengths[order]) - span_lengths[order]
    starts_row = np.diff(span_rows[order], prepend=-1) != 0
    columns = np.empty_like(span_lengths)
    columns[order] = before - np.maximum.accumulate(np.where(starts_row, before, 0))
    return columns
