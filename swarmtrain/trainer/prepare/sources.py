"""Files as records: the lines of JSONL, the rows of Parquet, or one whole text; and where a file may be cut into shards.

A shard depends on the files and on nothing else, so that its documents are the same whoever makes it.
"""

from __future__ import annotations

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

from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.prepare.options import PLACE, needed

_READ = 1 << 20
_ROWS = 1024
_PACKED = {".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4"}


class Kind(StrEnum):
    """What the records of a file are."""

    lines = "lines"
    rows = "rows"
    text = "text"


_KINDS = {".jsonl": Kind.lines, ".ndjson": Kind.lines, ".json": Kind.lines, ".parquet": Kind.rows}


@dataclass(frozen=True)
class Source:
    """A file, as it was when the work was begun."""

    name: str
    kind: Kind
    size: int
    """Bytes."""
    stamp: str
    """Changes whenever the file does."""

    def check(self) -> None:
        """Raise TrainingError if the file is not what it was."""
        if _stamp(self.name) != self.stamp:
            raise TrainingError(f"{self.name}: has changed while it was read", place=PLACE, hint="the same command begins anew with it")


@dataclass(frozen=True)
class Part:
    """A part of a file: bytes from `first` to before `end`, in which its lines begin, or groups of rows; a text has one part."""

    file: int
    first: int
    end: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Record:
    """One line, row or text."""

    at: int
    """The byte where the line begins; the number of the row."""
    values: Mapping[str, Any] | None
    """None if it cannot be read."""
    wrong: str = ""
    """Why not."""


def found(names: Sequence[str]) -> list[Source]:
    """Return the files that `names` and the globs among them stand for, each glob sorted. Raises TrainingError."""
    sources = []
    for name in names:
        matching = [name] if Path(name).exists() else sorted(glob.glob(name, recursive=True))  # noqa: PTH207  # relative names stay so
        matching = [each for each in matching if not Path(each).is_dir()]
        if not matching:
            raise TrainingError(f"{name}: no such file", place=PLACE, hint="folders are not searched: 'texts/**/*.jsonl' is what is in one")
        sources += [_source(each) for each in matching]
    names_of = Counter(os.path.realpath(each.name) for each in sources)
    if twice := next((each.name for each in sources if names_of[os.path.realpath(each.name)] > 1), None):
        raise TrainingError(f"{twice}: is named twice", place=PLACE, hint="each file is read once")
    return sources


def shards(sources: Sequence[Source], keys: Sequence[str], size: int) -> list[list[Part]]:
    """Return the parts of each shard, in order: about `size` bytes each. Raises TrainingError, also if a Parquet file lacks a key."""
    made: list[list[Part]] = []
    room = 0
    for number, source in enumerate(sources):
        for part in _parts(number, source, keys, size):
            if room <= 0:
                made.append([])
                room = size
            made[-1].append(part)
            room -= part.size
    return made


def records(source: Source, part: Part, keys: Sequence[str]) -> Iterator[Record]:
    """Yield the records of `part`; of their values those of `keys`. Blank lines are none."""
    if source.kind is Kind.rows:
        yield from _rows(source, part, keys)
    elif source.kind is Kind.lines:
        yield from _lines(source, part, keys)
    else:
        try:
            yield Record(0, {keys[0]: Path(source.name).read_bytes().decode()})
        except UnicodeDecodeError as error:
            yield Record(0, None, f"is no UTF-8: {error.reason} at byte {error.start}")


def place(source: Source, at: int) -> str:
    """Return where the record `at` is, for a person: a file and a line. Counts the lines before it."""
    if source.kind is Kind.text:
        return source.name
    if source.kind is Kind.rows:
        return f"{source.name} row {at + 1}"
    lines, left = 1, at
    with Path(source.name).open("rb") as file:
        while left and (piece := file.read(min(left, _READ))):
            lines, left = lines + piece.count(b"\n"), left - len(piece)
    return f"{source.name} line {lines}"


def digest(name: str) -> str:
    """Return the SHA-256 of a file."""
    with Path(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _source(name: str) -> Source:
    try:
        size, stamp = os.stat(name).st_size, _stamp(name)  # noqa: PTH116  # as _stamp does
    except OSError as error:
        raise TrainingError(f"{name}: {reason(error)}", place=PLACE) from None
    ending = Path(name).suffix.lower()
    if ending in _PACKED:
        raise TrainingError(f"{name}: is packed", place=PLACE, hint="unpack it: a packed file cannot be read by several at once")
    return Source(name, _KINDS.get(ending, Kind.text), size, stamp)


def _stamp(name: str) -> str:
    facts = os.stat(name)  # noqa: PTH116
    return f"{facts.st_size} {facts.st_mtime_ns} {facts.st_ctime_ns} {facts.st_ino}"


def _parts(number: int, source: Source, keys: Sequence[str], size: int) -> Iterator[Part]:
    if source.kind is Kind.text:
        yield Part(number, 0, source.size, source.size)
    elif source.kind is Kind.lines:
        for first in range(0, source.size, size):
            end = min(first + size, source.size)
            yield Part(number, first, end, end - first)
    else:
        facts = _parquet(source).metadata
        columns = facts.schema.to_arrow_schema().names
        if missing := next((key for key in keys if key not in columns), None):
            raise TrainingError(f"{source.name}: has no column {missing}", place=PLACE, hint=f"it has {', '.join(columns)}")
        for group in range(facts.num_row_groups):
            yield Part(number, group, group + 1, facts.row_group(group).total_byte_size)


def _lines(source: Source, part: Part, keys: Sequence[str]) -> Iterator[Record]:
    with Path(source.name).open("rb", buffering=_READ) as file:
        at = part.first
        if at:
            file.seek(at - 1)
            at += len(file.readline()) - 1
        while at < part.end and (line := file.readline()):
            if not line.isspace():
                yield _line(at, line, keys)
            at += len(line)


def _line(at: int, line: bytes, keys: Sequence[str]) -> Record:
    try:
        value = json.loads(line.decode("utf-8-sig" if at == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        return Record(at, None, f"is no UTF-8: {error.reason}")
    except json.JSONDecodeError as error:
        return Record(at, None, f"is no JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists a thousand deep
        return Record(at, None, f"cannot be read: {error}")
    if not isinstance(value, dict):
        return Record(at, None, "is no JSON object")
    if missing := next((key for key in keys if key not in value), None):
        return Record(at, None, f"has no {missing!r}; it has {', '.join(map(repr, value)) or 'nothing'}")
    return Record(at, value)


def _rows(source: Source, part: Part, keys: Sequence[str]) -> Iterator[Record]:
    file, torn = _parquet(source), needed("pyarrow").ArrowException
    at = sum(file.metadata.row_group(group).num_rows for group in range(part.first))
    batches = file.iter_batches(_ROWS, row_groups=range(part.first, part.end), columns=list(keys), use_threads=False)
    while True:
        try:
            batch = next(batches, None)
        except (torn, OSError) as error:
            raise TrainingError(f"{source.name}: is torn: {error}", place=PLACE) from None
        if batch is None:
            return
        for values in batch.to_pylist():
            yield Record(at, values)
            at += 1


def _parquet(source: Source) -> Any:
    arrow = needed("pyarrow")
    try:
        return needed("pyarrow.parquet").ParquetFile(source.name, memory_map=False)
    except (arrow.ArrowException, OSError) as error:
        raise TrainingError(f"{source.name}: is no Parquet file: {error}", place=PLACE) from None
