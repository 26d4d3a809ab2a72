"""A token file as packs of whole documents: no sample has a piece of a document that would have fitted whole.

A document of n tokens has n - 1 inputs, each with the next token as its target: its last token is only a target, and
nothing is asked across documents. What is longer than a sample fills samples of its own, and its rest is packed as a
short document. Packing is best-fit decreasing: the longest first, each into the fullest sample that has room for it
(Ding et al. 2024, arXiv 2404.10830). All of one length go at once, so it takes steps by length and not by document.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.spans import Spans


class Packs:
    """The samples of one file. Keeps 22 bytes of memory a document, and reads the whole index at the start."""

    shift = 1

    def __init__(self, file: MemoryMap, length: int) -> None:
        starts, inputs = file.documents[:, 0], np.maximum(file.documents[:, 1].astype(np.int64) - 1, 0)
        whole = inputs // length
        self._length = length
        self._full = np.repeat(np.arange(len(whole), dtype=np.int32), whole)
        """For each sample that a document fills: which document."""
        self._first_full = np.cumsum(whole) - whole
        self._starts = starts
        rests = np.flatnonzero(inputs % length)
        packs = best_fit((inputs % length)[rests], length)
        order = np.argsort(packs, kind="stable")
        self._pieces = rests[order].astype(np.int32)
        """Documents whose rest is packed, pack by pack."""
        self._ends = np.flatnonzero(np.diff(packs[order], append=-1)) + 1
        self._inputs = inputs

    def __len__(self) -> int:
        return len(self._full) + len(self._ends)

    def targets(self, ids: Ids) -> Ids:
        """Return how many targets each of the samples `ids` has."""
        spans = self.spans(ids)
        return np.bincount(spans.row, spans.count, minlength=len(ids)).astype(np.int64)

    def spans(self, ids: Ids) -> Spans:
        """Return where the tokens of the samples `ids` are."""
        rows, pieces = self._of_packs(ids)
        rests = self._inputs[pieces] % self._length
        whole = np.flatnonzero(ids < len(self._full))
        documents = self._full[ids[whole]]
        offsets = (ids[whole] - self._first_full[documents]) * self._length
        row = np.concatenate([whole, rows])
        start = np.concatenate([self._starts[documents] + offsets, self._starts[pieces] + self._inputs[pieces] - rests])
        count = np.concatenate([np.full_like(whole, self._length), rests])
        return Spans(row, _columns(row, count), start, count)

    def breaks(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return row and column of each token that begins a document, but for those in column 0."""
        spans = self.spans(ids)
        later = spans.column > 0
        return spans.row[later], spans.column[later]

    def _of_packs(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return the documents in those of `ids` that are packs, with the rows they are in."""
        rows = np.flatnonzero(ids >= len(self._full))
        packs = ids[rows] - len(self._full)
        ends = self._ends[packs]
        counts = ends - np.where(packs, self._ends[packs - 1], 0)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(rows, counts), self._pieces[np.repeat(ends - counts, counts) + within]


def best_fit(sizes: Ids, room: int) -> Ids:
    """Return for each of `sizes`, from 1 to `room`, the number of the pack it goes into; packs have `room` each."""
    packs = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    free: dict[int, list[Ids]] = defaultdict(list)
    count = 0
    if not len(sizes):
        return packs
    lengths, firsts = np.unique(-sizes[order], return_index=True)
    for size, of_size in zip((-lengths).tolist(), np.split(order, firsts[1:]), strict=True):
        left = of_size
        for space in sorted(space for space in free if space >= size):
            if not len(left):
                break
            left = _fill(packs, left, size, (space, np.concatenate(free.pop(space))), free)
        if len(left):
            fresh = -(-len(left) // (room // size))
            _fill(packs, left, size, (room, np.arange(count, count + fresh)), free)
            count += fresh
    return packs


def _fill(packs: Ids, items: Ids, size: int, into: tuple[int, Ids], free: dict[int, list[Ids]]) -> Ids:
    """Put `items` of `size` into packs that have some space each, as many as fit, one pack after the other. Return the rest."""
    space, bins = into
    each = space // size
    placed = min(len(items), each * len(bins))
    packs[items[:placed]] = np.repeat(bins, each)[:placed]
    full, some = divmod(placed, each)
    for used, chosen in ((each, bins[:full]), (some, bins[full : full + bool(some)]), (0, bins[full + bool(some) :])):
        if len(chosen) and space - used * size:
            free[space - used * size].append(chosen)
    return items[placed:]


def _columns(row: Ids, count: Ids) -> Ids:
    """Return where in its row each span begins: after those before it in the same row."""
    order = np.argsort(row, kind="stable")
    before = np.cumsum(count[order]) - count[order]
    new = np.diff(row[order], prepend=-1) != 0
    columns = np.empty_like(count)
    columns[order] = before - np.maximum.accumulate(np.where(new, before, 0))
    return columns
