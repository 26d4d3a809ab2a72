"""Data sets of samples: up to `sequence_length` input tokens with their targets, from one or several token files."""

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
from swarmtrain.trainer.data.memory_map import Ids, MemoryMap
from swarmtrain.trainer.data.sample_index import DocumentSamples, EmbeddingSamples, PackedSamples, SampleIndex, StreamSamples, TokenSpans
from swarmtrain.trainer.data.token_batch import BackgroundLoader, TokenBatch
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.random_seeds import derive_seed

_PROBE_TOKENS = 1 << 20
_MIN_BLOCK_POSITIONS, _MAX_BLOCK_POSITIONS = 1 << 4, 1 << 12
"""Minimum and maximum block size: the number of positions whose sample ids are computed at a time.

Computing the ids one by one would take longer than loading the samples. A block that spans many epochs is also slow, since the permutation
is computed once per epoch.
"""
_INDEX_TYPES: dict[Packing, type[StreamSamples] | type[PackedSamples]] = {Packing.stream: StreamSamples, Packing.documents: PackedSamples}


@dataclass(frozen=True)
class GlobalBatch:
    """A global batch: the ids of its samples, in order, and its number of loss tokens."""

    ids: Ids
    loss_tokens: int
    loss_denominator: int
    """Divisor of the summed loss: the number of loss tokens; if a sample has several rows (pairs, queries), the number of samples with any
    loss token."""

    def select_micro_batches(self, micro_batches_per_replica: Sequence[int], replica: int, micro_batch_size: int) -> list[tuple[int, Ids]]:
        """Return the micro batches of the replica with index `replica`: for each, its index in the global batch and its sample ids.

        `micro_batches_per_replica`: number of micro batches assigned to each replica. `micro_batch_size`: samples per micro batch. If the
        global batch has fewer samples than these micro batches, the last micro batch is smaller, and those after it are omitted. The list
        is empty if the replica has no sample.
        """
        first = sum(micro_batches_per_replica[:replica])
        return [
            (number, self.ids[number * micro_batch_size : (number + 1) * micro_batch_size])
            for number in range(first, first + micro_batches_per_replica[replica])
            if number * micro_batch_size < len(self.ids)
        ]


def open_data(config: Config) -> tuple[TokenDataset, TokenDataset | None]:
    """Return the training data and the validation data of `config`; the latter is None if there is no validation data.

    Raises TrainingError if a token file is missing or invalid.
    """
    architecture, seed, data = config.transformer_architecture, config.trainer.seed, config.data
    open_dataset = partial(
        TokenDataset,
        architecture=architecture,
        seed=seed,
        packing=data.packing,
        use_mmap=data.use_mmap,
        format=data.format,
        document_token=data.document_token,
    )
    training_fraction = 1 - data.validation_fraction
    training = open_dataset(
        data.data_prefixes,
        blend_config=data.blended_dataset,
        document_fractions=(0.0, training_fraction),
        companion_prefixes=data.collect_companion_prefixes(),
    )
    if data.validation_data_prefixes:
        return training, open_dataset(
            data.validation_data_prefixes, companion_prefixes=data.collect_companion_prefixes(for_validation=True)
        )
    return training, open_dataset(
        data.data_prefixes, document_fractions=(training_fraction, 1.0), companion_prefixes=data.collect_companion_prefixes()
    ) if training_fraction < 1 else None


class TokenDataset:
    """Samples of one or several token files. Samples shorter than `sequence_length` are padded, with IGNORE_INDEX as targets."""

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
    ) -> None:
        """Open the token files with the given `prefixes`.

        `seed` determines the sample order. `document_fractions`: range of each file's documents to use, as fractions.
        `companion_prefixes`: for each companion data set, such as the rejected responses, as many prefixes as `prefixes`; document i of a
        companion file belongs to document i of the matching file. `one_per_document`: each document is one sample. With an embedding
        head, this is always the case, since the model computes one embedding per document.

        Raises TrainingError if a file is missing or has no samples, DataError if its first or last tokens are outside the vocabulary.
        """
        if not prefixes:
            raise TrainingError(
                "specifies no data",
                place="config data",
                hint="set data_prefixes or validation_data_prefixes to a list of token file prefixes",
            )
        self.sequence_length, self.vocab_size, self.seed = architecture.sequence_length, architecture.vocab_size, seed
        self._has_documents = architecture.needs_document_ids
        open_file = partial(MemoryMap, use_mmap=use_mmap, format=format, document_token=document_token)
        self.token_files = [open_file(prefix).select_document_fraction(*document_fractions) for prefix in prefixes]
        index_type = (
            EmbeddingSamples
            if architecture.embedding_head_config
            else DocumentSamples
            if companion_prefixes or one_per_document
            else _INDEX_TYPES[packing]
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
        self.companion_datasets = [open_companion(each, one_per_document=True) for each in companion_prefixes]
        """Companion data sets, such as rejected responses: sample i of each belongs to sample i of this data set."""
        self.rows_per_sample = 1 + len(companion_prefixes)
        """Number of rows that a sample has in a batch: one, plus one for each companion data set."""
        if self._has_documents or index_type is not StreamSamples:
            for file in self.token_files:
                file.check_document_boundaries()
        self._sample_indexes: list[SampleIndex] = [index_type(file, self.sequence_length) for file in self.token_files]
        for file, sample_index in zip(self.token_files, self._sample_indexes, strict=True):
            if not len(sample_index):
                raise _build_no_samples_error(file, packing, document_fractions)
            vocabulary_check.check_tokenizer(file, self.vocab_size)
            for tokens in _read_first_and_last_tokens(file):
                vocabulary_check.check_tokens(tokens, self.vocab_size, f": {file.prefix}")
        self._sample_ends = np.cumsum([len(each) for each in self._sample_indexes])
        for companion in self.companion_datasets:
            _check_companion_documents(self, companion)
        self._sample_starts = np.concatenate([[0], self._sample_ends[:-1]])
        document_counts = [len(file.documents) for file in self.token_files]
        shares = (
            blend.compute_integer_weights(blend.compute_dataset_weights(blend_config, document_counts))
            if blend_config and blend_config.is_enabled
            else []
        )
        self._blend = Blend(shares) if shares else None
        is_default_order = (packing, document_fractions, shares) == (Packing.stream, (0.0, 1.0), [])
        shortest_epoch = min(len(each) for each in self._sample_indexes) if self._blend else len(self)
        self._block_size = size = min(max(shortest_epoch, _MIN_BLOCK_POSITIONS), _MAX_BLOCK_POSITIONS)
        self._cached_block_ids = lru_cache(maxsize=2)(lambda number: self._compute_sample_ids(number * size, size))
        document_token_key = "" if document_token is None else f" {document_token}"
        self._cached_batch = lru_cache(maxsize=2)(self._build_batch)
        self._order_key = document_token_key if is_default_order else f"{packing} {document_fractions} {shares}{document_token_key}"
        self._loader = BackgroundLoader(self._load_rows)
        self.load_seconds = 0.0
        """Total time in seconds that callers of `load_samples` have waited."""

    def __len__(self) -> int:
        return int(self._sample_ends[-1])

    @property
    def all_token_files(self) -> list[MemoryMap]:
        """All token files, including those of companion data sets."""
        return [*self.token_files, *(file for companion in self.companion_datasets for file in companion.token_files)]

    def build_batch(self, position: int, sample_count: int) -> GlobalBatch:
        """Return the global batch of `sample_count` samples that begins at `position` in the sample order."""
        return self._cached_batch(position, sample_count)

    def _build_batch(self, position: int, sample_count: int) -> GlobalBatch:
        first, last = position // self._block_size, (position + sample_count - 1) // self._block_size
        ids = np.concatenate([self._cached_block_ids(number) for number in range(first, last + 1)])
        ids = ids[position - first * self._block_size :][:sample_count]
        return GlobalBatch(ids, self.count_loss_tokens(ids), self.compute_loss_denominator(ids))

    def count_loss_tokens(self, sample_ids: Ids) -> int:
        """Return the number of loss tokens in the samples `sample_ids`, including companion samples."""
        return sum(int(dataset.count_loss_tokens_by_sample(sample_ids).sum()) for dataset in (self, *self.companion_datasets))

    def count_loss_tokens_by_sample(self, sample_ids: Ids) -> Ids:
        """Return the number of loss tokens of each of the samples `sample_ids`, without companion samples."""
        counts = np.zeros(len(sample_ids), dtype=np.int64)
        for number, rows, within in self._group_samples_by_file(sample_ids):
            counts[rows] = self._count_file_loss_tokens(number, within)
        return counts

    def compute_loss_denominator(self, sample_ids: Ids) -> int:
        """Return the divisor of the summed loss of the samples `sample_ids`: see GlobalBatch.loss_denominator."""
        if self.rows_per_sample == 1:
            return self.count_loss_tokens(sample_ids)
        counts = sum(dataset.count_loss_tokens_by_sample(sample_ids) for dataset in (self, *self.companion_datasets))
        return int(np.count_nonzero(counts))

    def load_samples(self, sample_ids: Ids) -> TokenBatch:
        """Return the samples `sample_ids` as a batch, each followed by its companion samples.

        Raises DataError for a token outside the vocabulary.
        """
        start_time = time.perf_counter()
        rows = self._loader.load_samples(sample_ids)
        self.load_seconds += time.perf_counter() - start_time
        return rows

    def start_loading(self, sample_ids: Ids) -> None:
        """Start loading the samples `sample_ids` in a thread, for the next call of `load_samples`."""
        self._loader.start_loading(sample_ids)

    def _load_rows(self, sample_ids: Ids) -> TokenBatch:
        return self._load_tokens(sample_ids).interleave_with([companion.load_samples(sample_ids) for companion in self.companion_datasets])

    def _load_tokens(self, sample_ids: Ids) -> TokenBatch:
        shape = (len(sample_ids), self.sequence_length)
        inputs, targets = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE_INDEX, dtype=np.int64)
        document_starts = np.zeros(shape, dtype=np.int64) if self._has_documents else None
        for number, rows, within in self._group_samples_by_file(sample_ids):
            file, sample_index = self.token_files[number], self._sample_indexes[number]
            spans = sample_index.locate_token_spans(within)
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
            self._raise_invalid_token(sample_ids)
        documents = None if document_starts is None else torch.from_numpy(document_starts.cumsum(axis=1))
        return TokenBatch(torch.from_numpy(inputs), torch.from_numpy(targets), documents)

    def locate_sample(self, sample_id: int) -> tuple[MemoryMap, TokenSpans, int]:
        """Return the token file that contains the sample with id `sample_id`, its token spans in the file, and its target shift."""
        ((number, _, within),) = self._group_samples_by_file(np.array([sample_id]))
        sample_index = self._sample_indexes[number]
        return self.token_files[number], sample_index.locate_token_spans(within), sample_index.target_shift

    def prefetch_samples(self, sample_ids: Ids) -> None:
        """Request read-ahead of the samples `sample_ids`: the operating system reads them in the background."""
        for companion in self.companion_datasets:
            companion.prefetch_samples(sample_ids)
        for number, _, within in self._group_samples_by_file(sample_ids):
            sample_index = self._sample_indexes[number]
            spans = sample_index.locate_token_spans(within)
            for start, count in zip(spans.start.tolist(), spans.count.tolist(), strict=True):
                self.token_files[number].tokens.prefetch_range(start, count + sample_index.target_shift)
                if mask := self.token_files[number].loss_mask:
                    mask.prefetch_range(start, count + sample_index.target_shift)

    def build_empty_sample(self) -> TokenBatch:
        """Return one sample that consists of padding only, and so has no loss tokens."""
        zeros = torch.zeros((self.rows_per_sample, self.sequence_length), dtype=torch.int64)
        return TokenBatch(zeros, torch.full_like(zeros, IGNORE_INDEX), zeros if self._has_documents else None)

    @property
    def fingerprint(self) -> str:
        """Hash of file sizes, of the first and last 2^20 tokens of each file, and of the settings that determine the sample order.

        If two nodes or two runs read different data, their fingerprints differ.
        """
        digest = hashlib.sha256(f"{self.sequence_length}{self._order_key}".encode())
        for companion in self.companion_datasets:
            digest.update(companion.fingerprint.encode())
        for file in self.token_files:
            digest.update(f"{file.tokens.dtype} {len(file.tokens)}".encode())
            for tokens in _read_first_and_last_tokens(file):
                digest.update(tokens.tobytes())
            if file.loss_mask is not None:
                digest.update(file.loss_mask[:_PROBE_TOKENS].tobytes() + file.loss_mask[-_PROBE_TOKENS:].tobytes())
        return digest.hexdigest()[:16]

    def _count_file_loss_tokens(self, file_index: int, indices_in_file: Ids) -> Ids:
        """Return the number of loss tokens of each of the samples `indices_in_file` of the token file with index `file_index`."""
        mask, sample_index = self.token_files[file_index].loss_mask, self._sample_indexes[file_index]
        if mask is None:
            return sample_index.count_targets(indices_in_file)
        spans, counts = sample_index.locate_token_spans(indices_in_file), np.zeros(len(indices_in_file), dtype=np.int64)
        first_targets = (spans.start + sample_index.target_shift).tolist()
        for row, start, count in zip(spans.row.tolist(), first_targets, spans.count.tolist(), strict=True):
            counts[row] += np.count_nonzero(mask[start : start + count])
        return counts

    def _raise_invalid_token(self, sample_ids: Ids) -> None:
        """Raise DataError for the first token outside the vocabulary in the samples `sample_ids`."""
        for number, _, within in self._group_samples_by_file(sample_ids):
            sample_index, file = self._sample_indexes[number], self.token_files[number]
            spans = sample_index.locate_token_spans(within)
            for start, count in zip(spans.start.tolist(), spans.count.tolist(), strict=True):
                vocabulary_check.check_tokens(
                    file.tokens[start : start + count + sample_index.target_shift], self.vocab_size, f": {file.prefix}", start
                )

    def _compute_sample_ids(self, position: int, sample_count: int) -> Ids:
        if self._blend is None:
            return shuffle.compute_sample_ids(position, sample_count, len(self), self.seed)
        sets, earlier_counts = self._blend.find_datasets_at(np.arange(position, position + sample_count, dtype=np.int64))
        ids = np.empty(sample_count, dtype=np.int64)
        for number in np.unique(sets):
            in_set = sets == number
            within = shuffle.shuffle_positions(
                earlier_counts[in_set], len(self._sample_indexes[number]), derive_seed("set", self.seed, int(number))
            )
            ids[in_set] = self._sample_starts[number] + within
        return ids

    def _group_samples_by_file(self, sample_ids: Ids) -> Iterator[tuple[int, Ids, Ids]]:
        """Yield, per token file with samples of `sample_ids`: its index, their indices in `sample_ids`, and their indices in the file."""
        files = np.searchsorted(self._sample_ends, sample_ids, side="right")
        for number in np.unique(files).tolist():
            rows = np.flatnonzero(files == number)
            yield number, rows, sample_ids[rows] - self._sample_starts[number]


def _check_companion_documents(dataset: TokenDataset, companion: TokenDataset) -> None:
    """Raise TrainingError if a file of `dataset` and the matching file of `companion` have other documents, as far as that is recorded."""
    for file, companion_file in zip(dataset.token_files, companion.token_files, strict=True):
        if len(file.documents) != len(companion_file.documents):
            raise TrainingError(
                f"{companion_file.prefix} has {len(companion_file.documents)} documents, but {file.prefix} has {len(file.documents)}",
                place="config data",
                hint="prepare both from the same records, with --on-bad stop: document i of one is paired with document i of the other",
            )
        metas = file.meta, companion_file.meta
        skipped_counts = [sum(meta.get("skipped", {}).values()) for meta in metas]
        hashes = {meta.get("skipped_records_sha256") for meta in metas}
        if any(skipped_counts) and (None in hashes or len(hashes) > 1):
            raise TrainingError(
                f"data tokenize skipped other records for {companion_file.prefix} ({skipped_counts[1]:,}) than for {file.prefix} "
                f"({skipped_counts[0]:,}), so that document i of one does not belong to document i of the other",
                place="config data",
                hint="remove the records in which one of the texts is empty or invalid, and tokenize all texts again",
            )


def _read_first_and_last_tokens(token_file: MemoryMap) -> tuple[Tokens, Tokens]:
    return token_file.tokens[:_PROBE_TOKENS], token_file.tokens[-_PROBE_TOKENS:]


def _build_no_samples_error(token_file: MemoryMap, packing: Packing, document_fractions: tuple[float, float]) -> TrainingError:
    if document_fractions != (0.0, 1.0):
        return TrainingError(
            f"{token_file.prefix}: {token_file.total_documents} documents are too few to split off data.validation_fraction",
            place="config data",
            hint="set data.validation_data_prefixes to separate validation data",
        )
    if packing is Packing.documents:
        return TrainingError(
            f"{token_file.prefix}: has no document with at least two tokens",
            place="config data",
            hint="set data.packing: stream, which reads across document boundaries",
        )
    return TrainingError(
        f"{token_file.prefix}: has fewer than two tokens", place="config data", hint="add data: a sample needs at least two tokens"
    )
