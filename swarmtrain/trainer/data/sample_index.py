"""Where the tokens of samples are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarmtrain.trainer.data.memory_map import Ids


@dataclass(frozen=True)
class TokenSpans:
    """Spans of tokens in a file, and their places in a batch: arrays of equal length.

    A span of `count` inputs is followed in the file by as many tokens as its targets are shifted by.
    """

    row: Ids
    column: Ids
    start: Ids
    """Its first token in the file."""
    count: Ids


class SampleIndex(Protocol):
    """A token file that is divided into samples."""

    target_shift: int
    """Tokens from an input to its target in the file."""

    def __len__(self) -> int: ...
    def count_targets(self, ids: Ids) -> Ids:
        """Return how many targets each of the samples `ids` has."""

    def locate_spans(self, ids: Ids) -> TokenSpans:
        """Return where the tokens of the samples `ids` are."""

    def find_document_starts(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return row and column of each token that begins a document, except those in column 0."""
