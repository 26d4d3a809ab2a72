"""Samples: up to `sequence_length` tokens, each with the next one as its target, from one or several token files."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch

from swarmtrain.config import Config
from swarmtrain.config.data import BlendedDatasetConfig, Format, Packing
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import blend, order, vocabulary
from swarmtrain.trainer.data.blend import Blend
from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.packs import Packs
from swarmtrain.trainer.data.rows import Rows
from swarmtrain.trainer.data.singles import Singles, Texts
from swarmtrain.trainer.data.spans import Cut, Spans
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.data.windows import Windows
from swarmtrain.trainer.model.targets import IGNORE
from swarmtrain.trainer.runtime import derived_seed

_PROBE = 1 << 20
_LEAST, _MOST = 1 << 4, 1 << 12
"""Positions whose samples are worked out at once: one by one that would take longer than to load them. Each epoch among them costs, too."""
_KINDS: dict[Packing, type[Windows] | type[Packs]] = {Packing.stream: Windows, Packing.documents: Packs}


@dataclass(frozen=True)
class Batch:
    """A global batch: ids of its samples in order, and how many tokens of it count in the loss."""

    ids: Ids
    tokens: int
    counted: int
    """What the loss is a mean over: these tokens, or samples of several rows."""

    def dealt(self, shares: Sequence[int], replica: int, micro_batch: int) -> list[tuple[int, Ids]]:
        """Return the micro batches of `replica`, with their numbers in the whole step. Empty if it gets none."""
        first = sum(shares[:replica])
        return [(number, self.ids[number * micro_batch : (number + 1) * micro_batch]) for number in range(first, first + shares[replica])]


def open_data(config: Config) -> tuple[Samples, Samples | None]:
    """Open what `config` names: the training data, and the held-out data if there is any. Raises TrainingError."""
    shape, seed, data = config.transformer_architecture, config.trainer.seed, config.data
    texts = config.trainer.contrastive_config is not None
    files = partial(
        Samples,
        shape=shape,
        seed=seed,
        packing=data.packing,
        use_mmap=data.use_mmap,
        format=data.format,
        document_token=data.document_token,
        texts=texts,
    )
    kept = 1 - data.validation_fraction
    training = files(data.data_prefixes, mix=data.blended_dataset, part=(0.0, kept), beside=data.beside())
    if data.validation_data_prefixes:
        return training, files(data.validation_data_prefixes, beside=data.beside(held_out=True))
    return training, files(data.data_prefixes, part=(kept, 1.0), beside=data.beside()) if kept < 1 else None


class Samples:
    """Token files as a list of samples. What a sample has less than `sequence_length` is filled up with IGNORE."""

    def __init__(
        self,
        prefixes: Sequence[Path],
        shape: TransformerArchitectureConfig,
        seed: int,
        *,
        packing: Packing = Packing.stream,
        mix: BlendedDatasetConfig | None = None,
        part: tuple[float, float] = (0.0, 1.0),
        use_mmap: bool = True,
        format: Format = Format.auto,
        document_token: int | None = None,
        beside: Sequence[Sequence[Path]] = (),
        singles: bool = False,
        texts: bool = False,
    ) -> None:
        """Open the files; `seed` is that of their order, and `part` says between which fractions of each file's documents to read.

        `beside`: lists of as many prefixes: each document there goes with the one of its number. `singles`: each document is a
        sample. `texts`: and it is seen as a whole.

        Raises TrainingError if there is none, or one has no sample, or tokens outside the vocabulary at its beginning or end.
        """
        if not prefixes:
            raise TrainingError(
                "names no data", place="config data", hint="data_prefixes and validation_data_prefixes are lists of prefixes of token files"
            )
        self.sequence_length, self.vocab_size, self.seed = shape.sequence_length, shape.vocab_size, seed
        self._numbered = shape.tells_documents_apart
        opened = partial(MemoryMap, use_mmap=use_mmap, format=format, document_token=document_token)
        self.maps = [opened(prefix).part(*part) for prefix in prefixes]
        cut = Texts if texts else Singles if beside or singles else _KINDS[packing]
        others = partial(Samples, shape=shape, seed=seed, part=part, use_mmap=use_mmap, format=format, document_token=document_token)
        self.beside = [others(each, singles=True, texts=texts) for each in beside]
        """What goes with it, as worse answers do: sample i of each with sample i here."""
        self.rows = 1 + len(beside)
        """Rows of a sample."""
        if self._numbered or cut is not Windows:
            for file in self.maps:
                file.check_documents()
        self._cuts: list[Cut] = [cut(file, self.sequence_length) for file in self.maps]
        for file, of_file in zip(self.maps, self._cuts, strict=True):
            if not len(of_file):
                raise _nothing(file, packing, part)
            vocabulary.check_tokenizer(file, self.vocab_size)
            for tokens in _ends(file):
                vocabulary.check(tokens, self.vocab_size, f": {file.prefix}")
        self._ends = np.cumsum([len(each) for each in self._cuts])
        for other in self.beside:
            _check_pairs(self, other)
        self._begins = np.concatenate([[0], self._ends[:-1]])
        documents = [len(file.documents) for file in self.maps]
        shares = blend.shares(blend.weights(mix, documents)) if mix and mix.enabled else []
        self._blend = Blend(shares) if shares else None
        plain = (packing, part, shares) == (Packing.stream, (0.0, 1.0), [])
        epoch = min(len(each) for each in self._cuts) if self._blend else len(self)
        self._at_once = size = min(max(epoch, _LEAST), _MOST)
        self._block = lru_cache(maxsize=2)(lambda number: self._ids(number * size, size))
        divided = "" if document_token is None else f" {document_token}"
        self._batch = lru_cache(maxsize=2)(self._batch_of)
        self._order = divided if plain else f"{packing} {part} {shares}{divided}"
        self.seconds = 0.0
        """What loading has taken, in all."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def files(self) -> list[MemoryMap]:
        """All files, those of what goes with it too."""
        return [*self.maps, *(file for other in self.beside for file in other.maps)]

    def batch(self, position: int, count: int) -> Batch:
        """Return the batch of `count` samples from global `position` on."""
        return self._batch(position, count)

    def _batch_of(self, position: int, count: int) -> Batch:
        first, last = position // self._at_once, (position + count - 1) // self._at_once
        ids = np.concatenate([self._block(number) for number in range(first, last + 1)])
        ids = ids[position - first * self._at_once :][:count]
        return Batch(ids, self.targets(ids), self.counted(ids))

    def targets(self, ids: Ids) -> int:
        """Return how many tokens of the samples `ids` count in the loss."""
        own = sum(self._targets(number, within) for number, _, within in self._by_file(ids))
        return own + sum(other.targets(ids) for other in self.beside)

    def counted(self, ids: Ids) -> int:
        """Return what the loss of the samples `ids` is a mean over: tokens that count, or samples of several rows."""
        return len(ids) if self.rows > 1 else self.targets(ids)

    def load(self, ids: Ids) -> Rows:
        """Return the samples `ids`, each with what goes with it. Raises DataError for a token outside the vocabulary."""
        begun = time.perf_counter()
        rows = self._load(ids).alternating([other.load(ids) for other in self.beside])
        self.seconds += time.perf_counter() - begun
        return rows

    def _load(self, ids: Ids) -> Rows:
        shape = (len(ids), self.sequence_length)
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
        breaks = np.zeros(shape, dtype=np.int64) if self._numbered else None
        for number, rows, within in self._by_file(ids):
            file, cut = self.maps[number], self._cuts[number]
            spans = cut.spans(within)
            for row, column, start, count in zip(rows[spans.row], spans.column, spans.start, spans.count, strict=True):
                window = file.tokens[start : start + count + cut.shift]
                inputs[row, column : column + count] = window[:count]
                targets[row, column : column + count] = window[cut.shift :]
                if file.mask is not None:
                    targets[row, column : column + count][file.mask[start + cut.shift : start + cut.shift + count] == 0] = IGNORE
            if breaks is not None:
                at, columns = cut.breaks(within)
                breaks[rows[at], columns] = 1
        if inputs.size and (inputs.min() < 0 or max(inputs.max(), targets.max()) >= self.vocab_size):
            self._refuse(ids)
        documents = None if breaks is None else torch.from_numpy(breaks.cumsum(axis=1))
        return Rows(torch.from_numpy(inputs), torch.from_numpy(targets), documents)

    def spans(self, sample: int) -> tuple[MemoryMap, Spans, int]:
        """Return the file that has a sample, where its tokens are in it, and by how much its targets are shifted."""
        ((number, _, within),) = self._by_file(np.array([sample]))
        cut = self._cuts[number]
        return self.maps[number], cut.spans(within), cut.shift

    def expect(self, ids: Ids) -> None:
        """Have the operating system read the samples `ids` from the disk meanwhile: they will be loaded soon."""
        for other in self.beside:
            other.expect(ids)
        for number, _, within in self._by_file(ids):
            cut = self._cuts[number]
            spans = cut.spans(within)
            for start, count in zip(spans.start.tolist(), spans.count.tolist(), strict=True):
                self.maps[number].tokens.expect(start, count + cut.shift)
                if mask := self.maps[number].mask:
                    mask.expect(start, count + cut.shift)

    def empty(self) -> Rows:
        """Return one sample in which nothing counts."""
        nothing = torch.zeros((self.rows, self.sequence_length), dtype=torch.int64)
        return Rows(nothing, torch.full_like(nothing, IGNORE), nothing if self._numbered else None)

    @property
    def fingerprint(self) -> str:
        """A hash of sizes, of the first and last MiB of each file and of what decides the order:
        enough to tell that two nodes or two runs read other data."""
        digest = hashlib.sha256(f"{self.sequence_length}{self._order}".encode())
        for other in self.beside:
            digest.update(other.fingerprint.encode())
        for file in self.maps:
            digest.update(f"{file.tokens.dtype} {len(file.tokens)}".encode())
            for tokens in _ends(file):
                digest.update(tokens.tobytes())
            if file.mask is not None:
                digest.update(file.mask[:_PROBE].tobytes() + file.mask[-_PROBE:].tobytes())
        return digest.hexdigest()[:16]

    def _targets(self, number: int, within: Ids) -> int:
        """Return how many tokens count in the loss in the samples `within` file `number`."""
        mask, cut = self.maps[number].mask, self._cuts[number]
        if mask is None:
            return int(cut.targets(within).sum())
        spans = cut.spans(within)
        spanned = zip(spans.start.tolist(), spans.count.tolist(), strict=True)
        return sum(int(np.count_nonzero(mask[start + cut.shift : start + cut.shift + count])) for start, count in spanned)

    def _refuse(self, ids: Ids) -> None:
        """Raise the error that names the token outside the vocabulary which is in the samples `ids`."""
        for number, _, within in self._by_file(ids):
            cut, file = self._cuts[number], self.maps[number]
            spans = cut.spans(within)
            for start, count in zip(spans.start.tolist(), spans.count.tolist(), strict=True):
                vocabulary.check(file.tokens[start : start + count + cut.shift], self.vocab_size, f": {file.prefix}", start)

    def _ids(self, position: int, count: int) -> Ids:
        if self._blend is None:
            return order.samples(position, count, len(self), self.seed)
        sets, turns = self._blend.places(np.arange(position, position + count, dtype=np.int64))
        ids = np.empty(count, dtype=np.int64)
        for number in np.unique(sets):
            chosen = sets == number
            within = order.at(turns[chosen], len(self._cuts[number]), derived_seed("set", self.seed, int(number)))
            ids[chosen] = self._begins[number] + within
        return ids

    def _by_file(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield each file that has some of the samples `ids`: its number, where in `ids` they are, and their numbers in the file."""
        files = np.searchsorted(self._ends, ids, side="right")
        for number in np.unique(files).tolist():
            rows = np.flatnonzero(files == number)
            yield number, rows, ids[rows] - self._begins[number]


def _check_pairs(these: Samples, others: Samples) -> None:
    """Raise TrainingError if they are not equally many in each file."""
    for one, other in zip(these.maps, others.maps, strict=True):
        if len(one.documents) != len(other.documents):
            raise TrainingError(
                f"{other.prefix} has {len(other.documents)} documents, and {one.prefix} {len(one.documents)}",
                place="config data",
                hint="prepare both from the same records, with --on-bad stop: document i of one goes with document i of the other",
            )


def _ends(file: MemoryMap) -> tuple[Tokens, Tokens]:
    return file.tokens[:_PROBE], file.tokens[-_PROBE:]


def _nothing(file: MemoryMap, packing: Packing, part: tuple[float, float]) -> TrainingError:
    if part != (0.0, 1.0):
        return TrainingError(
            f"{file.prefix}: {file.count} documents are too few to divide it by data.validation_fraction",
            place="config data",
            hint="name data to hold out as data.validation_data_prefixes",
        )
    if packing is Packing.documents:
        return TrainingError(
            f"{file.prefix}: has no document of two tokens", place="config data", hint="data.packing: stream reads over their ends"
        )
    return TrainingError(f"{file.prefix}: has fewer than two tokens", place="config data", hint="a sample is a token and the next one")
