"""Stream samples: windows over a token file, regardless of document boundaries. Sample i begins at token i × sequence_length.

The last token of a window is a target but not an input, and it is the first input of the next window. So every token except the first
of the file is a target once per epoch, also across document boundaries. The number of targets of a sample is known without reading the
index.
"""

from __future__ import annotations

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.sample_index import TokenSpans


class StreamSamples:
    """Index of the stream samples of one token file. The last sample may be shorter than the others."""

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
