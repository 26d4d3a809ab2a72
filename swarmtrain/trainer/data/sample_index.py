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
    def count_targets(self, sample_ids: Ids) -> Ids:
        """Return the number of targets of each of the samples `sample_ids`, as an int64 array."""

    def locate_token_spans(self, sample_ids: Ids) -> TokenSpans:
        """Return the token spans of the samples `sample_ids` in the token file."""

    def find_document_starts(self, sample_ids: Ids) -> tuple[Ids, Ids]:
        """Return the rows (indices in `sample_ids`) and columns at which documents begin, except in column 0."""
