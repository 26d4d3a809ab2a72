"""Samples that are single documents: sample i is document i of a token file, truncated to the sequence length.

In DocumentSamples, the target of each token is the next token. In EmbeddingSamples, the target of each token is the token itself: an
embedding model does not predict tokens, and a target only marks whether the token is ignored.
"""

from __future__ import annotations

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.sample_index import TokenSpans


class DocumentSamples:
    """Index of the documents of one token file, one sample per document."""

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
    """Index of the documents of one token file for embedding models, one sample per document."""

    target_shift = 0
