"""Build one shard: encode its records as documents, and write tokens, document lengths, loss mask (if any) and statistics to files.

Each file is published atomically. The file with the statistics is published last, and marks the shard as finished.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarmtrain.atomic_file import write_text_atomically
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.tokenize import readers
from swarmtrain.trainer.tokenize.readers import FilePart, SourceFile, SourceRecord
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE

_BATCH_CHARS = 1 << 20
_BATCH_RECORDS = 512
"""A batch of records that are encoded together ends at this number of records, or when it has `_BATCH_CHARS` characters."""
MAX_NAMED_BAD_RECORDS = 20
"""Maximum number of invalid records that are listed."""


@dataclass(frozen=True)
class Document:
    """The tokens of one document, and its loss mask: 1 for each token that contributes to the loss, else 0; None if all contribute."""

    tokens: Tokens
    loss_mask: Tokens | None = None


@dataclass
class ShardStats:
    """Statistics of a finished shard."""

    documents: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    """Number of tokens that contribute to the loss."""
    bad_count: int = 0
    """Number of invalid records, including records without a loss token."""
    empty_count: int = 0
    """Number of records without tokens."""
    records: int = 0
    skipped_records: list[int] = field(default_factory=list)
    """Indices of the invalid and the empty records among the records of the shard."""
    bad_records: list[tuple[int, int, str]] = field(default_factory=list)
    """The first invalid records: for each, index of the file, position of the record in the file, and description of the problem."""


class DocumentBuilder(Protocol):
    """Interface of a document builder, which builds documents from records."""

    keys: Sequence[str]
    """Keys of the values that the builder needs from each record; empty: it needs all values."""
    has_loss_mask: bool
    """True if the documents have a loss mask, since some tokens do not contribute to the loss."""
    dtype: str
    identity_options: Mapping[str, Any]
    """The options that affect the built documents."""
    begin_tokens: Sequence[int]
    """The tokens with which each document begins, as the tokenizer says: a prompt of a model that was trained on them begins so, too."""
    stop_tokens: Sequence[int]
    """The tokens that end a document, or a turn of the assistant: a model that was trained on the documents stops with them."""

    def find_record_problem(self, record: SourceRecord) -> str:
        """Return a description of why `record` cannot become a document; empty if it can."""

    def build_documents(self, records: Sequence[SourceRecord]) -> list[Document]:
        """Return one document per record."""


def list_data_file_suffixes(builder: DocumentBuilder) -> tuple[str, ...]:
    """Return the file name suffixes of a shard's data files: tokens, document lengths, and the loss mask, if any."""
    return ("bin", "len", "mask") if builder.has_loss_mask else ("bin", "len")


def build_shard(
    folder: Path,
    shard_number: int,
    file_parts: Sequence[FilePart],
    source_files: Sequence[SourceFile],
    builder: DocumentBuilder,
    *,
    stop_on_invalid_record: bool,
) -> ShardStats:
    """Write shard `shard_number` to `folder`, and return its statistics. `file_parts`: the file parts whose records it contains.

    If `stop_on_invalid_record` is set, raises TrainingError for the first invalid record.
    """
    stats = ShardStats()
    temporary_paths = {suffix: folder / f".{shard_number:06}.{suffix}.{os.getpid()}" for suffix in list_data_file_suffixes(builder)}
    streams = {suffix: path.open("wb") for suffix, path in temporary_paths.items()}
    try:
        for document in _iterate_documents(file_parts, source_files, builder, stats, stop_on_invalid_record=stop_on_invalid_record):
            streams["bin"].write(document.tokens.astype(builder.dtype).tobytes())
            streams["len"].write(len(document.tokens).to_bytes(8, "little"))
            if document.loss_mask is not None:
                streams["mask"].write(document.loss_mask.astype(np.uint8).tobytes())
                stats.loss_tokens += int(document.loss_mask.sum())
            stats.documents += 1
            stats.tokens += len(document.tokens)
        for source in {part.file_number: source_files[part.file_number] for part in file_parts}.values():
            source.check_file_unchanged()
        for stream in streams.values():
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        for stream in streams.values():
            stream.close()
    for suffix, path in temporary_paths.items():
        path.replace(folder / f"{shard_number:06}.{suffix}")
    write_text_atomically(folder / f"{shard_number:06}.json", json.dumps(asdict(stats)))
    return stats


def read_finished_shard_stats(folder: Path, shard_number: int) -> ShardStats | None:
    """Return the statistics of shard `shard_number` in `folder`; None if it is not finished."""
    try:
        return ShardStats(**json.loads((folder / f"{shard_number:06}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _iterate_documents(
    file_parts: Sequence[FilePart],
    source_files: Sequence[SourceFile],
    builder: DocumentBuilder,
    stats: ShardStats,
    *,
    stop_on_invalid_record: bool,
) -> Iterator[Document]:
    """Yield the documents of `file_parts`, and count invalid and empty records in `stats`."""
    for number, batch in _iterate_record_batches(file_parts, source_files, builder):
        problems = [record.problem or builder.find_record_problem(record) for record in batch]
        documents = iter(builder.build_documents([record for record, problem in zip(batch, problems, strict=True) if not problem]))
        for record, problem in zip(batch, problems, strict=True):
            document = None if problem else next(documents)
            stats.records += 1
            is_skipped = document is None or not len(document.tokens) or (document.loss_mask is not None and not document.loss_mask.any())
            if is_skipped:
                stats.skipped_records.append(stats.records - 1)
            if document is not None and not len(document.tokens):
                stats.empty_count += 1
            elif document is None or is_skipped:
                _handle_invalid_record(
                    stats,
                    (number, source_files[number]),
                    record,
                    problem or "has no loss tokens",
                    stop_on_invalid_record=stop_on_invalid_record,
                )
            else:
                yield document


def _iterate_record_batches(
    file_parts: Sequence[FilePart], source_files: Sequence[SourceFile], builder: DocumentBuilder
) -> Iterator[tuple[int, list[SourceRecord]]]:
    for part in file_parts:
        source, batch, size = source_files[part.file_number], list[SourceRecord](), 0
        for record in readers.iterate_records(source, part, builder.keys):
            batch.append(record)
            size += sum(len(str(record.values[key])) for key in builder.keys or record.values) if record.values else 0
            if size >= _BATCH_CHARS or len(batch) >= _BATCH_RECORDS:
                yield part.file_number, batch
                batch, size = [], 0
        if batch:
            yield part.file_number, batch


def build_invalid_record_error(source: SourceFile, position: int, problem: str) -> TrainingError:
    """Return the error for an invalid record at `position` of `source`."""
    return TrainingError(
        f"{readers.format_record_location(source, position)}: {problem}",
        place=ERROR_PLACE,
        hint="use --on-bad skip to drop such records and list them, or --on-bad count to drop and count them",
    )


def _handle_invalid_record(
    stats: ShardStats, numbered_source: tuple[int, SourceFile], record: SourceRecord, problem: str, *, stop_on_invalid_record: bool
) -> None:
    if stop_on_invalid_record:
        raise build_invalid_record_error(numbered_source[1], record.position, problem)
    stats.bad_count += 1
    if len(stats.bad_records) < MAX_NAMED_BAD_RECORDS:
        stats.bad_records.append((numbered_source[0], record.position, problem))
