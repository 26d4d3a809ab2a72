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

    It takes 22 bytes of memory per document, and reads the whole document index when it is created.
    """

    target_shift = 1

    def __init__(self, file: MemoryMap, sequence_length: int) -> None:
        starts, input_counts = file.documents[:, 0], np.maximum(file.documents[:, 1].astype(np.int64) - 1, 0)
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

    def count_targets(self, ids: Ids) -> Ids:
        """Return the number of targets of each of the samples `ids`, as an int64 array."""
        spans = self.locate_token_spans(ids)
        return np.bincount(spans.row, spans.count, minlength=len(ids)).astype(np.int64)

    def locate_token_spans(self, ids: Ids) -> TokenSpans:
        """Return the token spans in the file of the samples `ids`."""
        rows, packed_documents = self._list_packed_documents(ids)
        remainders = self._input_counts[packed_documents] % self._sequence_length
        full_rows = np.flatnonzero(ids < len(self._full_documents))
        documents = self._full_documents[ids[full_rows]]
        offsets = (ids[full_rows] - self._first_full_sample[documents]) * self._sequence_length
        row = np.concatenate([full_rows, rows])
        start = np.concatenate(
            [self._starts[documents] + offsets, self._starts[packed_documents] + self._input_counts[packed_documents] - remainders]
        )
        count = np.concatenate([np.full_like(full_rows, self._sequence_length), remainders])
        return TokenSpans(row, _compute_span_columns(row, count), start, count)

    def find_document_starts(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return rows and columns of the tokens in samples `ids` that begin a document, except those in column 0."""
        spans = self.locate_token_spans(ids)
        is_not_first = spans.column > 0
        return spans.row[is_not_first], spans.column[is_not_first]

    def _list_packed_documents(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return for every document in a pack of `ids` its row (index of the pack in `ids`) and its document index."""
        rows = np.flatnonzero(ids >= len(self._full_documents))
        packs = ids[rows] - len(self._full_documents)
        ends = self._pack_ends[packs]
        counts = ends - np.where(packs, self._pack_ends[packs - 1], 0)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(rows, counts), self._packed_documents[np.repeat(ends - counts, counts) + within]


def pack_items_best_fit(sizes: Ids, capacity: int) -> Ids:
    """Pack items of the given `sizes` (1 to `capacity`) into packs with space for `capacity`. Return the pack index of each item."""
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


def _fill_packs(packs: Ids, items: Ids, size: int, packs_with_space: tuple[int, Ids], packs_by_space: dict[int, list[Ids]]) -> Ids:
    """Put as many of `items`, all of the same `size`, as possible into `packs_with_space`. Return the remaining items.

    `packs_with_space`: the free space, equal in all these packs, and their indices. `packs` (pack index of each item) and `packs_by_space`
    (indices of the other packs, by free space) are updated.
    """
    space, bins = packs_with_space
    per_pack = space // size
    placed = min(len(items), per_pack * len(bins))
    packs[items[:placed]] = np.repeat(bins, per_pack)[:placed]
    full_count, leftover = divmod(placed, per_pack)
    for used, chosen in (
        (per_pack, bins[:full_count]),
        (leftover, bins[full_count : full_count + bool(leftover)]),
        (0, bins[full_count + bool(leftover) :]),
    ):
        if len(chosen) and space - used * size:
            packs_by_space[space - used * size].append(chosen)
    return items[placed:]


def _compute_span_columns(row: Ids, count: Ids) -> Ids:
    """Return the column at which each span begins: after all earlier spans of the same row. `count`: length of each span."""
    order = np.argsort(row, kind="stable")
    before = np.cumsum(count[order]) - count[order]
    starts_row = np.diff(row[order], prepend=-1) != 0
    columns = np.empty_like(count)
    columns[order] = before - np.maximum.accumulate(np.where(starts_row, before, 0))
    return columns
