"""A token file as its documents: sample i is document i, truncated to the sequence length.

In DocumentSamples the target of each token is the next one. In EmbeddingSamples, whose texts are embedded as a whole, it is the token
itself.
"""

from __future__ import annotations

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.sample_index import TokenSpans


class DocumentSamples:
    """The samples of one file."""

    target_shift = 1

    def __init__(self, file: MemoryMap, sequence_length: int) -> None:
        self._documents, self._sequence_length = file.documents, sequence_length

    def __len__(self) -> int:
        return len(self._documents)

    def count_targets(self, ids: Ids) -> Ids:
        """Return how many targets each of the samples `ids` has."""
        counts: Ids = np.clip(self._documents[ids, 1].astype(np.int64) - self.target_shift, 0, self._sequence_length)
        return counts

    def locate_spans(self, ids: Ids) -> TokenSpans:
        """Return where the tokens of the samples `ids` are."""
        rows = np.arange(len(ids))
        return TokenSpans(rows, np.zeros_like(rows), self._documents[ids, 0].astype(np.int64), self.count_targets(ids))

    def find_document_starts(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return row and column of each token that begins a document, except those in column 0: there are none."""
        no_starts = np.empty(0, dtype=np.int64)
        return no_starts, no_starts


class EmbeddingSamples(DocumentSamples):
    """The texts of one file, to be embedded."""

    target_shift = 0
