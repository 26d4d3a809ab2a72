"""Sample indexes: map each sample of a token file to spans of tokens in the file. One class per way to divide a file into samples."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap


@dataclass(frozen=True)
class TokenSpans:
    """Spans of tokens in a token file, and their positions in a batch, as arrays with one entry per span.

    A span has `count` inputs. In the file, a span is followed by `target_shift` more tokens: the targets of its last inputs.
    """

    row: Ids
    column: Ids
    start: Ids
    """Index of each span's first token in the file."""
    count: Ids


class SampleIndex(Protocol):
    """Interface of a sample index, which divides a token file into samples."""

    target_shift: int
    """Distance in tokens from an input to its target in the file: 1 for next-token prediction."""

    def __len__(self) -> int: ...
    def count_targets(self, sample_ids: Ids) -> Ids:
        """Return the number of targets of each of the samples `sample_ids`, as an int64 array."""

    def locate_token_spans(self, sample_ids: Ids) -> TokenSpans:
        """Return the token spans of the samples `sample_ids` in the token file."""

    def find_document_starts(self, sample_ids: Ids) -> tuple[Ids, Ids]:
        """Return the rows (indices in `sample_ids`) and columns at which documents begin, except in column 0."""


class StreamSamples:
    """Index of the stream samples of one token file: windows, regardless of document boundaries. The last one may be shorter.

    Sample i begins at token i × sequence_length. The last token of a window is a target but not an input, and it is the first input of the
    next window. So every token except the first of the file is a target once per epoch, also across document boundaries. The number of
    targets of a sample is known without reading the index.
    """

    target_shift = 1

    def __init__(self, token_file: MemoryMap, sequence_length: int) -> None:
        self._file, self._sequence_length = token_file, sequence_length
        self._target_count = max(0, token_file.token_end - token_file.token_start - 1)

    def __len__(self) -> int:
        return (self._target_count + self._sequence_length - 1) // self._sequence_length

    def count_targets(self, sample_ids: Ids) -> Ids:
        """Return the number of targets of each of the samples `sample_ids`, as an int64 array."""
        return np.minimum(self._sequence_length, self._target_count - sample_ids * self._sequence_length)

    def locate_token_spans(self, sample_ids: Ids) -> TokenSpans:
        """Return the token spans of the samples `sample_ids` in the token file."""
        rows = np.arange(len(sample_ids))
        return TokenSpans(
            rows, np.zeros_like(rows), self._file.token_start + sample_ids * self._sequence_length, self.count_targets(sample_ids)
        )

    def find_document_starts(self, sample_ids: Ids) -> tuple[Ids, Ids]:
        """Return the rows (indices in `sample_ids`) and columns at which documents begin, except in column 0."""
        starts = self._file.token_start + sample_ids * self._sequence_length
        first_documents = self._file.find_documents_at(starts)
        counts = self._file.find_documents_at(starts + self.count_targets(sample_ids) - 1) - first_documents
        rows = np.repeat(np.arange(len(sample_ids)), counts)
        documents = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first_documents, counts) + 1
        return rows, self._file.documents[documents, 0] - starts[rows]


class DocumentSamples:
    """Index of the documents of one token file: sample i is document i, truncated to the sequence length."""

    target_shift = 1

    def __init__(self, token_file: MemoryMap, sequence_length: int) -> None:
        self._documents, self._sequence_length = token_file.documents, sequence_length

    def __len__(self) -> int:
        return len(self._documents)

    def count_targets(self, sample_ids: Ids) -> Ids:
        """Return the number of targets of each of the samples `sample_ids`, as an int64 array."""
        counts: Ids = np.clip(self._documents[sample_ids, 1].astype(np.int64) - self.target_shift, 0, self._sequence_length)
        return counts

    def locate_token_spans(self, sample_ids: Ids) -> TokenSpans:
        """Return the token spans of the samples `sample_ids` in the token file."""
        rows = np.arange(len(sample_ids))
        return TokenSpans(rows, np.zeros_like(rows), self._documents[sample_ids, 0].astype(np.int64), self.count_targets(sample_ids))

    def find_document_starts(self, sample_ids: Ids) -> tuple[Ids, Ids]:
        """Return empty arrays: each sample is one document, so no document begins after column 0."""
        no_starts = np.empty(0, dtype=np.int64)
        return no_starts, no_starts


class EmbeddingSamples(DocumentSamples):
    """DocumentSamples for embedding models, which do not predict tokens: the target of each token is the token itself.

    A target only marks whether the token is ignored.
    """

    target_shift = 0


class PackedSamples:
    """Index of the packed samples of one token file: each contains complete documents, unless a document is longer than a sample.

    A document of n tokens has n - 1 inputs, each with the next token as its target. The last token of a document is only a target, and no
    target crosses a document boundary. A document longer than a sample fills one or more samples alone, and its remainder is packed like a
    short document.

    Packing is best-fit decreasing: the longest documents first, each into the fullest sample with enough space (Ding et al. 2024, arXiv
    2404.10830). All documents of the same length are packed at once, so the number of iterations depends on the number of different
    lengths, not on the number of documents. A sample of packed documents is called a pack.

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
