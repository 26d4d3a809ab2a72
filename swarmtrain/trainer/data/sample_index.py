"""Sample index: maps each sample of a token file to spans of tokens in the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarmtrain.trainer.data.memory_map import Ids


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
    def count_targets(self, ids: Ids) -> Ids:
        """Return the number of targets of each of the samples `ids`, as an int64 array."""

    def locate_token_spans(self, ids: Ids) -> TokenSpans:
        """Return the token spans in the file of the samples `ids`."""

    def find_document_starts(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return rows and columns of the tokens in samples `ids` that begin a document, except those in column 0."""
