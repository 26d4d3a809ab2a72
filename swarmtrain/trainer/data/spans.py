"""Where the tokens of samples are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarmtrain.trainer.data.memory_map import Ids


@dataclass(frozen=True)
class Spans:
    """Runs of tokens in a file, and where in a batch they go: equally long arrays.

    A span of `count` inputs is followed in the file by as many tokens more as its targets are shifted by.
    """

    row: Ids
    column: Ids
    start: Ids
    """Its first token in the file."""
    count: Ids


class Cut(Protocol):
    """A token file that is cut into samples."""

    shift: int
    """Tokens from an input to its target in the file."""

    def __len__(self) -> int: ...
    def targets(self, ids: Ids) -> Ids:
        """Return how many targets each of the samples `ids` has."""

    def spans(self, ids: Ids) -> Spans:
        """Return where the tokens of the samples `ids` are."""

    def breaks(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return row and column of each token that begins a document, but for those in column 0."""
