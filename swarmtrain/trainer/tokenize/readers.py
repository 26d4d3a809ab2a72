"""Read source files as records, and plan how files are split into shards.

The content of a shard depends only on the source files, not on the worker process that builds it. Only JSONL and Parquet files are split:
the others, and all compressed files, are read from their beginning.
"""

from __future__ import annotations

import codecs
import csv
import glob
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

from swarmtrain.config.user_files import check_regular_file, describe_os_error
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE, import_optional_dependency

_READ_BYTES = 1 << 20
_ROWS_PER_BATCH = 1024
_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_UNSUPPORTED_SUFFIXES = {".xz", ".zip", ".lz4", ".7z", ".tar", ".tgz", ".arrow", ".feather", ".xlsx"}
_MAX_FIELD_CHARACTERS = 1 << 30


class RecordKind(StrEnum):
    """Type of the records in a source file."""

    lines = "line"
    """Lines of JSONL."""
    array = "element"
    """Elements of a JSON array."""
    table = "row"
    """Rows of CSV or TSV, below a row with the names of the columns."""
    rows = "row of Parquet"
    text = "text"
    """One whole text."""


_JSON_SUFFIXES = {".jsonl", ".ndjson", ".json"}
_DELIMITERS = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class SourceFile:
    """A source file, with its size and its fingerprint (`stamp`) at the start of the job."""

    name: str
    kind: RecordKind
    size: int
    """Size in bytes."""
    stamp: str
    """Fingerprint of the file, which changes whenever the file changes: size, modification time, inode change time and inode number."""
    compression: str | None = None
    """As pyarrow names it; None if the file is not compressed."""

    @property
    def is_splittable(self) -> bool:
        """Whether records in the middle of the file can be found."""
        return self.compression is None and self.kind in (RecordKind.lines, RecordKind.rows)

    def check_file_unchanged(self) -> None:
        """Raise TrainingError if the file has changed since the job started."""
        if _compute_file_fingerprint(self.name) != self.stamp:
            raise TrainingError(
                f"{self.name}: changed while it was being read", place=ERROR_PLACE, hint="run the same command again to start from scratch"
            )


@dataclass(frozen=True)
class FilePart:
    """A part of a source file: the JSONL lines that begin in bytes `first` to `end` - 1, or the Parquet row groups `first` to `end` - 1.

    Any other file has a single part.
    """

    file_number: int
    first: int
    end: int
    size: int
    """Size in bytes."""


@dataclass(frozen=True)
class SourceRecord:
    """One record of a source file."""

    position: int
    """Byte offset of a line, or index of any other record and of a line in a compressed file."""
    values: Mapping[str, Any] | None
    """Values of the record by key; None if the record cannot be read."""
    problem: str = ""
    """Description of why the record cannot be read; empty if it can."""


def find_source_files(path_patterns: Sequence[str]) -> list[SourceFile]:
    """Return the source files that `path_patterns` match. A pattern is a path or a glob; the matches of a glob are sorted.

    Raises TrainingError if a pattern matches no file, or if a file is matched twice.
    """
    sources = []
    for name in path_patterns:
        matching = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207  # keeps relative names relative
        matching = [each for each in matching if not Path(each).is_dir()]
        if not matching:
            raise TrainingError(
                f"{name}: no such file", place=ERROR_PLACE, hint="use a pattern for the files of a folder, such as 'texts/**/*.jsonl'"
            )
        sources += [_inspect_source_file(each) for each in matching]
    path_counts = Counter(os.path.realpath(each.name) for each in sources)
    if duplicate := next((each.name for each in sources if path_counts[os.path.realpath(each.name)] > 1), None):
        raise TrainingError(f"{duplicate}: is listed twice", place=ERROR_PLACE, hint="pass each file only once")
    return sources


def plan_shards(source_files: Sequence[SourceFile], record_keys: Sequence[str], shard_bytes: int) -> list[list[FilePart]]:
    """Return the file parts of each shard, in order. Each shard has about `shard_bytes` bytes.

    Raises TrainingError if a file cannot be read, or if a Parquet file lacks one of the columns `record_keys`.
    """
    plan: list[list[FilePart]] = []
    remaining_bytes = 0
    for file_number, source in enumerate(source_files):
        for part in _iterate_file_parts(file_number, source, record_keys, shard_bytes):
            if remaining_bytes <= 0:
                plan.append([])
                remaining_bytes = shard_bytes
            plan[-1].append(part)
            remaining_bytes -= part.size
    return plan


def iterate_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    """Yield the records of `part`. The values of each readable record include those for `record_keys`. Blank lines are skipped.

    A key may be a path: `meta.text` is the value of `text` in `meta`. Raises TrainingError if the file is corrupt.
    """
    iterate = {
        RecordKind.lines: _iterate_jsonl_records,
        RecordKind.array: _iterate_array_records,
        RecordKind.table: _iterate_table_records,
        RecordKind.rows: _iterate_parquet_records,
        RecordKind.text: _iterate_text_records,
    }[source_file.kind]
    for record in iterate(source_file, part, record_keys):
        yield _resolve_keys(record, record_keys)


def format_record_location(source_file: SourceFile, position: int) -> str:
    """Return file name and number of the record at `position`, for messages. Reads the lines before it to count them."""
    if source_file.kind is RecordKind.text:
        return source_file.name
    if source_file.kind is not RecordKind.lines or source_file.compression:
        return f"{source_file.name} {source_file.kind.value.split()[0]} {position + 1}"
    lines, remaining = 1, position
    with Path(source_file.name).open("rb") as file:
        while remaining and (block := file.read(min(remaining, _READ_BYTES))):
            lines, remaining = lines + block.count(b"\n"), remaining - len(block)
    return f"{source_file.name} line {lines}"


def hash_file(name: str) -> str:
    """Return the SHA-256 of the file `name` as hex digits."""
    with Path(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _inspect_source_file(name: str) -> SourceFile:
    try:
        size, stamp = check_regular_file(Path(name)).st_size, _compute_file_fingerprint(name)
    except OSError as error:
        raise TrainingError(f"{name}: {describe_os_error(error)}", place=ERROR_PLACE) from None
    compression = _COMPRESSIONS.get(Path(name).suffix.lower())
    suffix = Path(Path(name).stem if compression else name).suffix.lower()
    if suffix in _UNSUPPORTED_SUFFIXES or (compression and suffix == ".parquet"):
        hint = "convert it to JSONL, JSON, CSV, TSV, Parquet or plain text, or decompress it; .gz, .zst and .bz2 are read"
        raise TrainingError(f"{name}: files of this format are not read", place=ERROR_PLACE, hint=hint)
    source = SourceFile(name, RecordKind.text, size, stamp, compression)
    if suffix in _DELIMITERS:
        return replace(source, kind=RecordKind.table)
    if suffix == ".parquet":
        return replace(source, kind=RecordKind.rows)
    if suffix not in _JSON_SUFFIXES:
        return source
    with _open_source(source) as file:
        first = file.read(_READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
    return replace(source, kind=RecordKind.array if first == b"[" else RecordKind.lines)


@contextmanager
def _open_source(source_file: SourceFile) -> Iterator[IO[bytes]]:
    """Context manager that opens a file, decompressed. Raises TrainingError if it is corrupt, or cannot be read."""
    try:
        if source_file.compression is None:
            with Path(source_file.name).open("rb", buffering=_READ_BYTES) as file:
                yield file
        else:
            stream = import_optional_dependency("pyarrow").input_stream(source_file.name, compression=source_file.compression)
            with io.BufferedReader(stream, _READ_BYTES) as file:
                yield file
    except OSError as error:
        reason = f"cannot be decompressed: {error}" if source_file.compression else describe_os_error(error)
        raise TrainingError(f"{source_file.name}: {reason}", place=ERROR_PLACE) from None


def _compute_file_fingerprint(name: str) -> str:
    file_stat = os.stat(name)  # noqa: PTH116
    return f"{file_stat.st_size} {file_stat.st_mtime_ns} {file_stat.st_ctime_ns} {file_stat.st_ino}"


def _iterate_file_parts(file_number: int, source_file: SourceFile, record_keys: Sequence[str], shard_bytes: int) -> Iterator[FilePart]:
    if source_file.kind is RecordKind.text and len(record_keys) != 1:
        fields = f"the fields {' and '.join(map(repr, record_keys))}" if record_keys else "conversations"
        hint = "use JSONL, JSON, CSV or Parquet files, whose records have fields"
        raise TrainingError(f"{source_file.name}: is one text, without {fields}", place=ERROR_PLACE, hint=hint)
    if source_file.kind is RecordKind.rows:
        metadata = _open_parquet(source_file).metadata
        _check_columns(source_file, metadata.schema.to_arrow_schema().names, record_keys)
        for group in range(metadata.num_row_groups):
            yield FilePart(file_number, group, group + 1, metadata.row_group(group).total_byte_size)
    elif source_file.is_splittable:
        for first in range(0, source_file.size, shard_bytes):
            end = min(first + shard_bytes, source_file.size)
            yield FilePart(file_number, first, end, end - first)
    else:
        if source_file.kind is RecordKind.table:
            with _open_table(source_file) as rows:
                _check_columns(source_file, rows.fieldnames or (), record_keys)
        yield FilePart(file_number, 0, source_file.size, source_file.size)


def _check_columns(source_file: SourceFile, columns: Sequence[str], record_keys: Sequence[str]) -> None:
    if missing := next((key for key in record_keys if key not in columns and key.partition(".")[0] not in columns), None):
        raise TrainingError(
            f"{source_file.name}: has no column {missing}", place=ERROR_PLACE, hint=f"choose one of its columns: {', '.join(columns)}"
        )


def _resolve_keys(record: SourceRecord, record_keys: Sequence[str]) -> SourceRecord:
    """Return a record with the value of each of `record_keys`; with a problem if it has no such value."""
    values = record.values
    if values is None or all(key in values for key in record_keys):
        return record
    resolved = dict(values)
    for key in record_keys:
        if key not in values:
            parent: Any = values
            for name in key.split("."):
                if not isinstance(parent, dict) or name not in parent:
                    problem = f"has no key {key!r}; its keys: {', '.join(map(repr, values)) or 'none'}"
                    return SourceRecord(record.position, None, problem)
                parent = parent[name]
            resolved[key] = parent
    return SourceRecord(record.position, resolved)


def _iterate_text_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    with _open_source(source_file) as file:
        content = file.read()
    try:
        yield SourceRecord(part.first, {record_keys[0]: content.decode("utf-8-sig")})
    except UnicodeDecodeError as error:
        yield SourceRecord(part.first, None, f"is not UTF-8: {error.reason} at byte {error.start}")


def _iterate_jsonl_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    with _open_source(source_file) as file:
        if source_file.compression:
            for number, line in enumerate(file):
                if not line.isspace():
                    yield _parse_jsonl_record(number, line)
            return
        position = part.first
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1
        while position < part.end and (line := file.readline()):
            if not line.isspace():
                yield _parse_jsonl_record(position, line)
            position += len(line)


def _iterate_array_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    with _open_source(source_file) as file:
        content = file.read()
    try:
        elements = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError, too
        raise TrainingError(f"{source_file.name}: is not a JSON array: {error}", place=ERROR_PLACE) from None
    for number, element in enumerate(elements):
        yield SourceRecord(number, element) if isinstance(element, dict) else SourceRecord(number, None, "is not a JSON object")


def _iterate_table_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    with _open_table(source_file) as rows:
        for number, row in enumerate(rows):
            has_other_width = None in row or None in row.values()
            problem = "has another number of fields than the first row" if has_other_width else ""
            yield SourceRecord(number, None if problem else row, problem)


@contextmanager
def _open_table(source_file: SourceFile) -> Iterator[csv.DictReader[str]]:
    """Context manager that yields the rows of a table. Raises TrainingError if it is not one."""
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    suffix = Path(Path(source_file.name).stem if source_file.compression else source_file.name).suffix.lower()
    with _open_source(source_file) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
        rows = csv.DictReader(text, delimiter=_DELIMITERS[suffix], strict=True)
        try:
            yield rows
        except (csv.Error, UnicodeDecodeError) as error:
            raise TrainingError(f"{source_file.name} line {rows.line_num}: is not a table: {error}", place=ERROR_PLACE) from None


def _parse_jsonl_record(position: int, line: bytes) -> SourceRecord:
    try:
        value = json.loads(line.decode("utf-8-sig" if position == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return SourceRecord(position, None, f"is not UTF-8: {error.reason}")
    except json.JSONDecodeError as error:
        return SourceRecord(position, None, f"is not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:  # integers with thousands of digits, or lists nested too deeply
        return SourceRecord(position, None, f"cannot be read: {error}")
    return SourceRecord(position, value) if isinstance(value, dict) else SourceRecord(position, None, "is not a JSON object")


def _iterate_parquet_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    file, arrow_error = _open_parquet(source_file), import_optional_dependency("pyarrow").ArrowException
    position = sum(file.metadata.row_group(group).num_rows for group in range(part.first))
    batches = file.iter_batches(
        _ROWS_PER_BATCH, row_groups=range(part.first, part.end), columns=list(record_keys) or None, use_threads=False
    )
    while True:
        try:
            batch = next(batches, None)
        except (arrow_error, OSError) as error:
            raise TrainingError(f"{source_file.name}: is corrupt: {error}", place=ERROR_PLACE) from None
        if batch is None:
            return
        for values in batch.to_pylist():
            yield SourceRecord(position, values)
            position += 1


def _open_parquet(source_file: SourceFile) -> Any:
    arrow = import_optional_dependency("pyarrow")
    try:
        return import_optional_dependency("pyarrow.parquet").ParquetFile(source_file.name, memory_map=False)
    except (arrow.ArrowException, OSError) as error:
        raise TrainingError(f"{source_file.name}: is not a Parquet file: {error}", place=ERROR_PLACE) from None
