"""One shard: records in, and three or four files out that appear whole, the last of them saying that the others are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.prepare import sources
from swarmtrain.trainer.prepare.options import PLACE
from swarmtrain.trainer.prepare.sources import Part, Record, Source

_BATCH = 1 << 20
_MOST = 512
"""Records that are encoded together: of this many characters, or this many."""
TOLD = 20
"""Bad records that are named at most."""


@dataclass(frozen=True)
class Document:
    """The tokens of one document, and which of them count in the loss; None: all do."""

    tokens: Tokens
    counts: Tokens | None = None


@dataclass
class Facts:
    """What a shard came to."""

    documents: int = 0
    tokens: int = 0
    counted: int = 0
    """Tokens that count in the loss."""
    bad: int = 0
    """Records that could not be read."""
    empty: int = 0
    """Records without a token."""
    told: list[tuple[int, int, str]] = field(default_factory=list)
    """The first bad ones: the file, the record, and what is wrong with it."""


class Shaper(Protocol):
    """What makes documents of records."""

    keys: Sequence[str]
    """The values that it needs of each record."""
    masked: bool
    """True if not all tokens count."""
    dtype: str
    told: Mapping[str, Any]
    """The options that decide what comes out."""

    def wrong(self, record: Record) -> str:
        """Return why a document cannot be made of `record`, else nothing."""

    def documents(self, records: Sequence[Record]) -> list[Document]:
        """Return the document of each."""


def endings(shaper: Shaper) -> tuple[str, ...]:
    """Return the endings of a shard's files."""
    return ("bin", "len", "mask") if shaper.masked else ("bin", "len")


def make(folder: Path, number: int, parts: Sequence[Part], files: Sequence[Source], shaper: Shaper, *, stop: bool) -> Facts:
    """Write shard `number` into `folder`. Raises TrainingError for the first bad record if it is to `stop`."""
    facts = Facts()
    asides = {ending: folder / f".{number:06}.{ending}.{os.getpid()}" for ending in endings(shaper)}
    opened = {ending: path.open("wb") for ending, path in asides.items()}
    try:
        for document in _documents(parts, files, shaper, facts, stop=stop):
            opened["bin"].write(document.tokens.astype(shaper.dtype).tobytes())
            opened["len"].write(len(document.tokens).to_bytes(8, "little"))
            if document.counts is not None:
                opened["mask"].write(document.counts.astype(np.uint8).tobytes())
                facts.counted += int(document.counts.sum())
            facts.documents += 1
            facts.tokens += len(document.tokens)
        for source in {part.file: files[part.file] for part in parts}.values():
            source.check()
        for file in opened.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in opened.values():
            file.close()
    for ending, path in asides.items():
        path.replace(folder / f"{number:06}.{ending}")
    aside = folder / f".{number:06}.json.{os.getpid()}"
    aside.write_text(json.dumps(asdict(facts)))
    aside.replace(folder / f"{number:06}.json")
    return facts


def known(folder: Path, number: int) -> Facts | None:
    """Return what shard `number` came to, if it is done."""
    try:
        return Facts(**json.loads((folder / f"{number:06}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def _documents(parts: Sequence[Part], files: Sequence[Source], shaper: Shaper, facts: Facts, *, stop: bool) -> Iterator[Document]:
    """Yield the documents of `parts`; note in `facts` what none is made of."""
    for number, batch in _batches(parts, files, shaper):
        wrong = [record.wrong or shaper.wrong(record) for record in batch]
        made = iter(shaper.documents([record for record, why in zip(batch, wrong, strict=True) if not why]))
        for record, why in zip(batch, wrong, strict=True):
            document = None if why else next(made)
            if document is not None and not len(document.tokens):
                facts.empty += 1
            elif document is None or (document.counts is not None and not document.counts.any()):
                _bad(facts, (number, files[number]), record, why or "has no token that counts in the loss", stop=stop)
            else:
                yield document


def _batches(parts: Sequence[Part], files: Sequence[Source], shaper: Shaper) -> Iterator[tuple[int, list[Record]]]:
    for part in parts:
        source, batch, size = files[part.file], list[Record](), 0
        for record in sources.records(source, part, shaper.keys):
            batch.append(record)
            size += sum(len(str(record.values[key])) for key in shaper.keys) if record.values else 0
            if size >= _BATCH or len(batch) >= _MOST:
                yield part.file, batch
                batch, size = [], 0
        if batch:
            yield part.file, batch


def bad_record(source: Source, at: int, wrong: str) -> TrainingError:
    """Return the error that names a bad record."""
    return TrainingError(
        f"{sources.place(source, at)}: {wrong}",
        place=PLACE,
        hint="--on-bad skip goes on without such records, and names them; --on-bad count only counts them",
    )


def _bad(facts: Facts, of: tuple[int, Source], record: Record, wrong: str, *, stop: bool) -> None:
    if stop:
        raise bad_record(of[1], record.at, wrong)
    facts.bad += 1
    if len(facts.told) < TOLD:
        facts.told.append((of[0], record.at, wrong))
