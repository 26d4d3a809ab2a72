"""A token file as its documents: sample i is document i, from its beginning as far as it fits.

Singles have each token's next one as its target. Texts, which are seen as a whole, have the token itself.
"""

from __future__ import annotations

import numpy as np

from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.spans import Spans


class Singles:
    """The samples of one file."""

    shift = 1

    def __init__(self, file: MemoryMap, length: int) -> None:
        self._documents, self._length = file.documents, length

    def __len__(self) -> int:
        return len(self._documents)

    def targets(self, ids: Ids) -> Ids:
        """Return how many targets each of the samples `ids` has."""
        found: Ids = np.clip(self._documents[ids, 1].astype(np.int64) - self.shift, 0, self._length)
        return found

    def spans(self, ids: Ids) -> Spans:
        """Return where the tokens of the samples `ids` are."""
        rows = np.arange(len(ids))
        return Spans(rows, np.zeros_like(rows), self._documents[ids, 0].astype(np.int64), self.targets(ids))

    def breaks(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return row and column of each token that begins a document, but for those in column 0: there are none."""
        nothing = np.empty(0, dtype=np.int64)
        return nothing, nothing


class Texts(Singles):
    """The texts of one file."""

    shift = 0
