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
from swarmtrain.config.schema.data import BlendedDatasetConfig, Packing, TokenFileFormat
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import blend, shuffle, vocabulary_check
from swarmtrain.trainer.data.blend import Blend
from swarmtrain.trainer.data.document_samples import DocumentSamples, EmbeddingSamples
from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.packed_samples import PackedSamples
from swarmtrain.trainer.data.sample_index import SampleIndex, TokenSpans
from swarmtrain.trainer.data.stream_samples import StreamSamples
from swarmtrain.trainer.data.token_batch import TokenBatch
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.runtime import derive_seed

_PROBE_TOKENS = 1 << 20
_MIN_BLOCK_POSITIONS, _MAX_BLOCK_POSITIONS = 1 << 4, 1 << 12
"""Positions whose sample ids are computed at once: one by one that would take longer than loading them. Each epoch in a block has a
cost, too.
"""
_INDEX_TYPES: dict[Packing, type[StreamSamples] | type[PackedSamples]] = {Packing.stream: StreamSamples, Packing.documents: PackedSamples}


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch: ids of its samples in order, and its number of loss tokens."""

    ids: Ids
    loss_tokens: int
    loss_denominator: int
    """What the loss is a mean over: loss tokens, or samples if a sample has several rows."""

    def select_micro_batches(self, micro_batches_per_replica: Sequence[int], replica: int, micro_batch_size: int) -> list[tuple[int, Ids]]:
        """Return the micro batches of `replica`, with their numbers in the global batch. Empty if it gets none."""
        first = sum(micro_batches_per_replica[:replica])
        return [
            (number, self.ids[number * micro_batch_size : (number + 1) * micro_batch_size])
            for number in range(first, first + micro_batches_per_replica[replica])
        ]


def open_data(config: Config) -> tuple[TokenDataset, TokenDataset | None]:
    """Open the data that `config` names: training data, and validation data if there is any. Raises TrainingError."""
    architecture, seed, data = config.transformer_architecture, config.trainer.seed, config.data
    for_embedding = config.trainer.contrastive_config is not None
    open_dataset = partial(
        TokenDataset,
        architecture=architecture,
        seed=seed,
        packing=data.packing,
        use_mmap=data.use_mmap,
        format=data.format,
        document_token=data.document_token,
        for_embedding=for_embedding,
    )
    training_fraction = 1 - data.validation_fraction
    training = open_dataset(
        data.data_prefixes,
        blend_config=data.blended_dataset,
        document_fractions=(0.0, training_fraction),
        companion_prefixes=data.collect_companion_prefixes(),
    )
    if data.validation_data_prefixes:
        return training, open_dataset(data.validation_data_prefixes, companion_prefixes=data.collect_companion_prefixes(validation=True))
    return training, open_dataset(
        data.data_prefixes, document_fractions=(training_fraction, 1.0), companion_prefixes=data.collect_companion_prefixes()
    ) if training_fraction < 1 else None


class TokenDataset:
    """Token files as a list of samples. Samples shorter than `sequence_length` are padded; padded targets are IGNORE_INDEX."""

    def __init__(
        self,
        prefixes: Sequence[Path],
        architecture: TransformerArchitectureConfig,
        seed: int,
        *,
        packing: Packing = Packing.stream,
        blend_config: BlendedDatasetConfig | None = None,
        document_fractions: tuple[float, float] = (0.0, 1.0),
        use_mmap: bool = True,
        format: TokenFileFormat = TokenFileFormat.auto,
        document_token: int | None = None,
        companion_prefixes: Sequence[Sequence[Path]] = (),
        one_per_document: bool = False,
        for_embedding: bool = False,
    ) -> None:
        """Open the files. `seed` determines the sample order, `document_fractions` which range of each file's documents to read.

        `companion_prefixes`: lists with as many prefixes: each of their documents belongs to the document with its number.
        `one_per_document`: each document is a sample. `for_embedding`: also, and it is embedded as a whole.
        Raises TrainingError if there is no file, one has no sample, or one has tokens outside the vocabulary at its beginning or end.
        """
        if not prefixes:
            raise TrainingError(
                "names no data", place="config data", hint="data_prefixes and validation_data_prefixes are lists of prefixes of token files"
            )
        self.sequence_length, self.vocab_size, self.seed = architecture.sequence_length, architecture.vocab_size, seed
        self._has_documents = architecture.needs_document_ids
        open_file = partial(MemoryMap, use_mmap=use_mmap, format=format, document_token=document_token)
        self.token_files = [open_file(prefix).select_fraction(*document_fractions) for prefix in prefixes]
        index_type = (
            EmbeddingSamples if for_embedding else DocumentSamples if companion_prefixes or one_per_document else _INDEX_TYPES[packing]
        )
        open_companion = partial(
            TokenDataset,
            architecture=architecture,
            seed=seed,
            document_fractions=document_fractions,
            use_mmap=use_mmap,
            format=format,
            document_token=document_token,
        )
        self.companion_datasets = [open_companion(each, one_per_document=True, for_embedding=for_embedding) for each in companion_prefixes]
        """The data that belongs to it, such as rejected responses: sample i of each belongs to sample i here."""
        self.rows_per_sample = 1 + len(companion_prefixes)
        """Rows of a sample."""
        if self._has_documents or index_type is not StreamSamples:
            for file in self.token_files:
                file.check_documents()
        self._sample_indexes: list[SampleIndex] = [index_type(file, self.sequence_length) for file in self.token_files]
        for file, sample_index in zip(self.token_files, self._sample_indexes, strict=True):
            if not len(sample_index):
                raise _build_no_samples_error(file, packing, document_fractions)
            vocabulary_check.check_tokenizer(file, self.vocab_size)
            for tokens in _probe_ends(file):
                vocabulary_check.check_tokens(tokens, self.vocab_size, f": {file.prefix}")
        self._sample_ends = np.cumsum([len(each) for each in self._sample_indexes])
        for companion in self.companion_datasets:
            _check_companion_counts(self, companion)
        self._sample_starts = np.concatenate([[0], self._sample_ends[:-1]])
        document_counts = [len(file.documents) for file in self.token_files]
        shares = blend.compute_shares(blend.compute_weights(blend_config, document_counts)) if blend_config and blend_config.enabled else []
        self._blend = Blend(shares) if shares else None
        is_default_order = (packing, document_fractions, shares) == (Packing.stream, (0.0, 1.0), [])
        shortest_epoch = min(len(each) for each in self._sample_indexes) if self._blend else len(self)
        self._block_size = size = min(max(shortest_epoch, _MIN_BLOCK_POSITIONS), _MAX_BLOCK_POSITIONS)
        self._cached_block_ids = lru_cache(maxsize=2)(lambda number: self._compute_ids(number * size, size))
        document_token_key = "" if document_token is None else f" {document_token}"
        self._cached_batch = lru_cache(maxsize=2)(self._build_batch)
        self._order_key = document_token_key if is_default_order else f"{packing} {document_fractions} {shares}{document_token_key}"
        self.load_seconds = 0.0
        """Total time spent loading."""

    def __len__(self) -> int:
        return int(self._sample_ends[-1])

    @property
    def all_token_files(self) -> list[MemoryMap]:
        """All files, including those of companion datasets."""
        return [*self.token_files, *(file for companion in self.companion_datasets for file in companion.token_files)]

    def build_batch(self, position: int, count: int) -> GlobalBatch:
        """Return the batch of `count` samples from global `position`."""
        return self._cached_batch(position, count)

    def _build_batch(self, position: int, count: int) -> GlobalBatch:
        first, last = position // self._block_size, (position + count - 1) // self._block_size
        ids = np.concatenate([self._cached_block_ids(number) for number in range(first, last + 1)])
        ids = ids[position - first * self._block_size :][:count]
        return GlobalBatch(ids, self.count_loss_tokens(ids), self.compute_loss_denominator(ids))

    def count_loss_tokens(self, ids: Ids) -> int:
        """Return the number of loss tokens of the samples `ids`."""
        own_count = sum(self._count_file_loss_tokens(number, within) for number, _, within in self._group_by_file(ids))
        return own_count + sum(companion.count_loss_tokens(ids) for companion in self.companion_datasets)

    def compute_loss_denominator(self, ids: Ids) -> int:
        """Return what the loss of the samples `ids` is a mean over: loss tokens, or samples if a sample has several rows."""
        return len(ids) if self.rows_per_sample > 1 else self.count_loss_tokens(ids)

    def load(self, ids: Ids) -> TokenBatch:
        """Return the samples `ids`, each with its companions. Raises DataError for a token outside the vocabulary."""
        start_time = time.perf_counter()
        rows = self._load_tokens(ids).interleave_with([companion.load(ids) for companion in self.companion_datasets])
        self.load_seconds += time.perf_counter() - start_time
        return rows

    def _load_tokens(self, ids: Ids) -> TokenBatch:
        shape = (len(ids), self.sequence_length)
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE_INDEX, dtype=np.int64)
        document_starts = np.zeros(shape, dtype=np.int64) if self._has_documents else None
        for number, rows, within in self._group_by_file(ids):
            file, sample_index = self.token_files[number], self._sample_indexes[number]
            spans = sample_index.locate_spans(within)
            for row, column, start, count in zip(rows[spans.row], spans.column, spans.start, spans.count, strict=True):
                window = file.tokens[start : start + count + sample_index.target_shift]
                inputs[row, column : column + count] = window[:count]
                targets[row, column : column + count] = window[sample_index.target_shift :]
                if file.loss_mask is not None:
                    targets[row, column : column + count][
                        file.loss_mask[start + sample_index.target_shift : start + sample_index.target_shift + count] == 0
                    ] = IGNORE_INDEX
            if document_starts is not None:
                matching_rows, columns = sample_index.find_document_starts(within)
                document_starts[rows[matching_rows], columns] = 1
        if inputs.size and (inputs.min() < 0 or max(inputs.max(), targets.max()) >= self.vocab_size):
            self._raise_invalid_token(ids)
        documents = None if document_starts is None else torch.from_numpy(document_starts.cumsum(axis=1))
        return TokenBatch(torch.from_numpy(inputs), torch.from_numpy(targets), documents)

    def locate_sample(self, sample: int) -> tuple[MemoryMap, TokenSpans, int]:
        """Return the file of a sample, where its tokens are in it, and the shift of its targets."""
        ((number, _, within),) = self._group_by_file(np.array([sample]))
        sample_index = self._sample_indexes[number]
        return self.token_files[number], sample_index.locate_spans(within), sample_index.target_shift

    def prefetch_samples(self, ids: Ids) -> None:
        """Have the operating system read the samples `ids` from the disk in the background: they will be loaded soon."""
        for companion in self.companion_datasets:
            companion.prefetch_samples(ids)
        for number, _, within in self._group_by_file(ids):
            sample_index = self._sample_indexes[number]
            spans = sample_index.locate_spans(within)
            for start, count in zip(spans.start.tolist(), spans.count.tolist(), strict=True):
                self.token_files[number].tokens.prefetch_range(start, count + sample_index.target_shift)
                if mask := self.token_files[number].loss_mask:
                    mask.prefetch_range(start, count + sample_index.target_shift)

    def build_empty_sample(self) -> TokenBatch:
        """Return one padded sample, without loss tokens."""
        zeros = torch.zeros((self.rows_per_sample, self.sequence_length), dtype=torch.int64)
        return TokenBatch(zeros, torch.full_like(zeros, IGNORE_INDEX), zeros if self._has_documents else None)

    @property
    def fingerprint(self) -> str:
        """A hash of sizes, of the first and last 2^20 tokens of each file, and of what determines the order:
        enough to detect that two nodes or two runs read different data.
        """
        digest = hashlib.sha256(f"{self.sequence_length}{self._order_key}".encode())
        for companion in self.companion_datasets:
            digest.update(companion.fingerprint.encode())
        for file in self.token_files:
            digest.update(f"{file.tokens.dtype} {len(file.tokens)}".encode())
            for tokens in _probe_ends(file):
                digest.update(tokens.tobytes())
            if file.loss_mask is not None:
                digest.update(file.loss_mask[:_PROBE_TOKENS].tobytes() + file.loss_mask[-_PROBE_TOKENS:].tobytes())
        return digest.hexdigest()[:16]

    def _count_file_loss_tokens(self, number: int, within: Ids) -> int:
        """Return the number of loss tokens of the samples `within` file `number`."""
        mask, sample_index = self.token_files[number].loss_mask, self._sample_indexes[number]
        if mask is None:
            return int(sample_index.count_targets(within).sum())
        spans = sample_index.locate_spans(within)
        spanned = zip(spans.start.tolist(), spans.count.tolist(), strict=True)
        return sum(
            int(np.count_nonzero(mask[start + sample_index.target_shift : start + sample_index.target_shift + count]))
            for start, count in spanned
        )

    def _raise_invalid_token(self, ids: Ids) -> None:
        """Raise the error that names the token outside the vocabulary in the samples `ids`."""
        for number, _, within in self._group_by_file(ids):
            sample_index, file = self._sample_indexes[number], self.token_files[number]
            spans = sample_index.locate_spans(within)
            for start, count in zip(spans.start.tolist(), spans.count.tolist(), strict=True):
                vocabulary_check.check_tokens(
                    file.tokens[start : start + count + sample_index.target_shift], self.vocab_size, f": {file.prefix}", start
                )

    def _compute_ids(self, position: int, count: int) -> Ids:
        if self._blend is None:
            return shuffle.compute_sample_ids(position, count, len(self), self.seed)
        sets, earlier_counts = self._blend.locate_positions(np.arange(position, position + count, dtype=np.int64))
        ids = np.empty(count, dtype=np.int64)
        for number in np.unique(sets):
            in_set = sets == number
            within = shuffle.shuffle_positions(
                earlier_counts[in_set], len(self._sample_indexes[number]), derive_seed("set", self.seed, int(number))
            )
            ids[in_set] = self._sample_starts[number] + within
        return ids

    def _group_by_file(self, ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield each file that has some of the samples `ids`: its number, their indices in `ids`, and their numbers in the file."""
        files = np.searchsorted(self._sample_ends, ids, side="right")
        for number in np.unique(files).tolist():
            rows = np.flatnonzero(files == number)
            yield number, rows, ids[rows] - self._sample_starts[number]


def _check_companion_counts(dataset: TokenDataset, companion: TokenDataset) -> None:
    """Raise TrainingError if `dataset` and `companion` do not have equally many documents in each file."""
    for file, companion_file in zip(dataset.token_files, companion.token_files, strict=True):
        if len(file.documents) != len(companion_file.documents):
            raise TrainingError(
                f"{companion_file.prefix} has {len(companion_file.documents)} documents, and {file.prefix} {len(file.documents)}",
                place="config data",
                hint="prepare both from the same records, with --on-bad stop: document i of one goes with document i of the other",
            )


def _probe_ends(file: MemoryMap) -> tuple[Tokens, Tokens]:
    return file.tokens[:_PROBE_TOKENS], file.tokens[-_PROBE_TOKENS:]


def _build_no_samples_error(file: MemoryMap, packing: Packing, document_fractions: tuple[float, float]) -> TrainingError:
    if document_fractions != (0.0, 1.0):
        return TrainingError(
            f"{file.prefix}: {file.total_documents} documents are too few to divide it by data.validation_fraction",
            place="config data",
            hint="name data to hold out as data.validation_data_prefixes",
        )
    if packing is Packing.documents:
        return TrainingError(
            f"{file.prefix}: has no document of two tokens", place="config data", hint="data.packing: stream reads over their ends"
        )
    return TrainingError(f"{file.prefix}: has fewer than two tokens", place="config data", hint="a sample is a token and the next one")
