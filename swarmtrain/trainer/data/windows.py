"""A token file as windows over its stream: sample i begins at token i × sequence_length, whatever documents are there.

The last token of a window is only a target, and the first input of the next window: every token but the file's first is
a target once an epoch. That holds across documents too, so a sample's number of targets is known without the index.
"""

from __future__ import annotations

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.spans import Spans


class Windows:
    """The samples of one file. The last may be short."""

    shift = 1

    def __init__(self, file: MemoryMap, length: int) -> None:
        self._file, self._length = file, length
        self._targets = max(0, file.end - file.first - 1)

    def __len__(self) -> int:
        return (self._targets + self._length - 1) // self._length

    def targets(self, ids: Ids) -> Ids:
        """Return how many targets each of the samples `ids` has."""
        return np.minimum(self._length, self._targets - ids * self._length)

    def spans(self, ids: Ids) -> Spans:
        """Return where the tokens of the samples `ids` are."""
        rows = np.arange(len(ids))
        return Spans(rows, np.zeros_like(rows), self._file.first + ids * self._length, self.targets(ids))

    def breaks(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return row and column of each token that begins a document, but for those in column 0."""
        starts = self._file.first + ids * self._length
        first = self._file.document_at(starts)
        counts = self._file.document_at(starts + self.targets(ids) - 1) - first
        rows = np.repeat(np.arange(len(ids)), counts)
        documents = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts) + 1
        return rows, self._file.documents[documents, 0] - starts[rows]
