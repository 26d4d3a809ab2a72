"""Samples: windows of `sequence_length` tokens and the same shifted by one, over one or several token files."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import order
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.order import Ids
from swarmtrain.trainer.data.rows import Rows
from swarmtrain.trainer.model.transformer import IGNORE

_PROBE = 1 << 20


@dataclass(frozen=True)
class Batch:
    """A global batch: ids of its samples in order, and how many tokens of it count in the loss."""

    ids: Ids
    tokens: int

    def dealt(self, shares: Sequence[int], replica: int, micro_batch: int) -> list[tuple[int, Ids]]:
        """Return the micro batches of `replica`, with their numbers in the whole step. Empty if it gets none."""
        first = sum(shares[:replica])
        return [(number, self.ids[number * micro_batch : (number + 1) * micro_batch]) for number in range(first, first + shares[replica])]


class Samples:
    """Token files as a list of samples. The last window of each file may be short; it is filled up with IGNORE."""

    def __init__(self, prefixes: Sequence[Path], shape: TransformerArchitectureConfig, seed: int) -> None:
        """Open the files; `seed` is that of their order. Raises TrainingError if there is none, or one has no sample."""
        if not prefixes:
            raise TrainingError(
                "names no data", place="config data", hint="data_prefixes and validation_data_prefixes are lists of prefixes of token files"
            )
        self.sequence_length = shape.sequence_length
        self.vocab_size = shape.vocab_size
        self.seed = seed
        self.maps = [MemoryMap(prefix) for prefix in prefixes]
        lengths = [max(0, len(part.tokens) - 1) for part in self.maps]
        if 0 in lengths:
            raise TrainingError(
                f"{prefixes[lengths.index(0)]}: has fewer than two tokens", place="config data", hint="a sample is a token and the next one"
            )
        self._targets = np.array(lengths)
        self._ends = np.cumsum([-(-length // self.sequence_length) for length in lengths])
        self._begins = self._ends - np.diff(self._ends, prepend=0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def batch(self, position: int, count: int) -> Batch:
        """Return the batch of `count` samples from global `position` on."""
        ids = order.samples(position, count, len(self), self.seed)
        parts, starts = self._places(ids)
        return Batch(ids, int(np.minimum(self.sequence_length, self._targets[parts] - starts).sum()))

    def load(self, ids: Ids) -> Rows:
        """Return the samples `ids`.

        Raises TrainingError for a token outside the vocabulary.
        """
        inputs = np.zeros((len(ids), self.sequence_length), dtype=np.int64)
        targets = np.full((len(ids), self.sequence_length), IGNORE, dtype=np.int64)
        for row, (part, start) in enumerate(zip(*self._places(ids), strict=True)):
            window = self.maps[part].tokens[start : start + self.sequence_length + 1]
            inputs[row, : len(window) - 1] = window[:-1]
            targets[row, : len(window) - 1] = window[1:]
        if inputs.size and max(inputs.max(), targets.max()) >= self.vocab_size:
            raise TrainingError(
                f"is {self.vocab_size}, and token {max(inputs.max(), targets.max())} is in the data",
                place="config transformer_architecture.vocab_size",
                hint="it is one more than the highest token that there can be; or is it the data of another tokenizer?",
            )
        return Rows(torch.from_numpy(inputs), torch.from_numpy(targets))

    def empty(self) -> Rows:
        """Return one sample in which nothing counts."""
        shape = (1, self.sequence_length)
        return Rows(torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORE))

    @property
    def fingerprint(self) -> str:
        """A hash of sizes and of the first and last MiB of each file: enough to tell that two nodes or two runs read other data."""
        digest = hashlib.sha256(str(self.sequence_length).encode())
        for part in self.maps:
            digest.update(f"{part.tokens.dtype} {len(part.tokens)}".encode())
            digest.update(part.tokens[:_PROBE].tobytes())
            digest.update(part.tokens[-_PROBE:].tobytes())
        return digest.hexdigest()[:16]

    def _places(self, ids: Ids) -> tuple[Ids, Ids]:
        """Return for each sample its file and its first token there."""
        parts = np.searchsorted(self._ends, ids, side="right")
        return parts, (ids - self._begins[parts]) * self.sequence_length
