"""Read source files as records (lines of JSONL, rows of Parquet, or one whole text), and plan how files are split into shards.

The content of a shard depends only on the source files, not on the worker process that builds it.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from swarmtrain.config.user_files import check_regular_file, describe_os_error
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.tokenize.tokenize_options import ERROR_PLACE, import_optional_dependency

_READ_BYTES = 1 << 20
_ROWS_PER_BATCH = 1024
_TABLE_SUFFIXES = {".csv", ".tsv"}
_COMPRESSED_SUFFIXES = {".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4"}


class RecordKind(StrEnum):
    """Type of the records in a source file: lines of JSONL, rows of Parquet, or one whole text."""

    lines = "lines"
    rows = "rows"
    text = "text"


_KIND_OF_SUFFIX = {".jsonl": RecordKind.lines, ".ndjson": RecordKind.lines, ".json": RecordKind.lines, ".parquet": RecordKind.rows}


@dataclass(frozen=True)
class SourceFile:
    """A source file, with its size and its fingerprint (`stamp`) at the start of the job."""

    name: str
    kind: RecordKind
    size: int
    """Size in bytes."""
    stamp: str
    """Fingerprint of the file, which changes whenever the file changes: size, modification time, inode change time and inode number."""

    def check_file_unchanged(self) -> None:
        """Raise TrainingError if the file has changed since the job started."""
        if _compute_file_fingerprint(self.name) != self.stamp:
            raise TrainingError(
                f"{self.name}: changed while it was being read", place=ERROR_PLACE, hint="run the same command again to start from scratch"
            )


@dataclass(frozen=True)
class FilePart:
    """A part of a source file: the JSONL lines that begin in bytes `first` to `end` - 1, or the Parquet row groups `first` to `end` - 1.

    A file that is one whole text has a single part.
    """

    file_number: int
    first: int
    end: int
    size: int
    """Size in bytes."""


@dataclass(frozen=True)
class SourceRecord:
    """One record of a source file: a line, a row or a whole text."""

    position: int
    """Byte offset of the line, or index of the row."""
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
    """Yield the records of `part`. The values of each readable record include those for `record_keys`. Blank lines are skipped."""
    if source_file.kind is RecordKind.rows:
        yield from _iterate_parquet_records(source_file, part, record_keys)
    elif source_file.kind is RecordKind.lines:
        yield from _iterate_jsonl_records(source_file, part, record_keys)
    else:
        try:
            yield SourceRecord(0, {record_keys[0]: Path(source_file.name).read_bytes().decode("utf-8-sig")})
        except UnicodeDecodeError as error:
            yield SourceRecord(0, None, f"is not UTF-8: {error.reason} at byte {error.start}")


def format_record_location(source_file: SourceFile, position: int) -> str:
    """Return file name and line or row number of the record at `position`, for messages. Reads the lines before it to count them."""
    if source_file.kind is RecordKind.text:
        return source_file.name
    if source_file.kind is RecordKind.rows:
        return f"{source_file.name} row {position + 1}"
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
    suffix = Path(name).suffix.lower()
    if suffix in _COMPRESSED_SUFFIXES:
        raise TrainingError(
            f"{name}: is compressed", place=ERROR_PLACE, hint="decompress it: a compressed file cannot be read by several processes at once"
        )
    kind = _KIND_OF_SUFFIX.get(suffix, RecordKind.text)
    if suffix in _TABLE_SUFFIXES:
        raise TrainingError(f"{name}: is a table", place=ERROR_PLACE, hint="convert it to JSONL or Parquet, for instance with pandas")
    if kind is RecordKind.lines and _read_first_character(name) == b"[":
        hint = f"write each of its elements in a line: jq -c '.[]' {name} > {Path(name).with_suffix('.jsonl')}"
        raise TrainingError(f"{name}: is a JSON array, not JSONL", place=ERROR_PLACE, hint=hint)
    return SourceFile(name, kind, size, stamp)


def _read_first_character(name: str) -> bytes:
    """Return the first character of a file that is not a space, nor a byte order mark; empty if there is none in the first MiB."""
    with Path(name).open("rb") as file:
        return file.read(_READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()[:1]


def _compute_file_fingerprint(name: str) -> str:
    file_stat = os.stat(name)  # noqa: PTH116
    return f"{file_stat.st_size} {file_stat.st_mtime_ns} {file_stat.st_ctime_ns} {file_stat.st_ino}"


def _iterate_file_parts(file_number: int, source_file: SourceFile, record_keys: Sequence[str], shard_bytes: int) -> Iterator[FilePart]:
    if source_file.kind is RecordKind.text:
        if len(record_keys) > 1:
            fields = " and ".join(map(repr, record_keys))
            hint = "use JSONL or Parquet files, whose records have fields"
            raise TrainingError(f"{source_file.name}: is one text, without the fields {fields}", place=ERROR_PLACE, hint=hint)
        yield FilePart(file_number, 0, source_file.size, source_file.size)
    elif source_file.kind is RecordKind.lines:
        for first in range(0, source_file.size, shard_bytes):
            end = min(first + shard_bytes, source_file.size)
            yield FilePart(file_number, first, end, end - first)
    else:
        metadata = _open_parquet(source_file).metadata
        columns = metadata.schema.to_arrow_schema().names
        if missing := next((key for key in record_keys if key not in columns), None):
            raise TrainingError(
                f"{source_file.name}: has no column {missing}", place=ERROR_PLACE, hint=f"choose one of its columns: {', '.join(columns)}"
            )
        for group in range(metadata.num_row_groups):
            yield FilePart(file_number, group, group + 1, metadata.row_group(group).total_byte_size)


def _iterate_jsonl_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    with Path(source_file.name).open("rb", buffering=_READ_BYTES) as file:
        position = part.first
        if position:
            file.seek(position - 1)
            position += len(file.readline()) - 1
        while position < part.end and (line := file.readline()):
            if not line.isspace():
                yield _parse_jsonl_record(position, line, record_keys)
            position += len(line)


def _parse_jsonl_record(position: int, line: bytes, record_keys: Sequence[str]) -> SourceRecord:
    try:
        value = json.loads(line.decode("utf-8-sig" if position == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return SourceRecord(position, None, f"is not UTF-8: {error.reason}")
    except json.JSONDecodeError as error:
        return SourceRecord(position, None, f"is not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:  # integers with thousands of digits, or lists nested too deeply
        return SourceRecord(position, None, f"cannot be read: {error}")
    if not isinstance(value, dict):
        return SourceRecord(position, None, "is not a JSON object")
    if missing := next((key for key in record_keys if key not in value), None):
        return SourceRecord(position, None, f"has no key {missing!r}; its keys: {', '.join(map(repr, value)) or 'none'}")
    return SourceRecord(position, value)


def _iterate_parquet_records(source_file: SourceFile, part: FilePart, record_keys: Sequence[str]) -> Iterator[SourceRecord]:
    file, arrow_error = _open_parquet(source_file), import_optional_dependency("pyarrow").ArrowException
    position = sum(file.metadata.row_group(group).num_rows for group in range(part.first))
    batches = file.iter_batches(_ROWS_PER_BATCH, row_groups=range(part.first, part.end), columns=list(record_keys), use_threads=False)
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
