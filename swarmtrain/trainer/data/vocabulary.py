"""Whether all tokens are in the vocabulary: found out before the first step, and not hours later in the batch that has one which is not.

All ranks look together, each at a part, as fast as files are read, and for some seconds at most. Where these do not suffice,
what was looked at is an even sample, and the rest is checked as it is read. What was seen is remembered beside the run:
a restart looks at nothing again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.config.files import OPEN, reason, write_all
from swarmtrain.errors import DataError, TrainingError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.data import order
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.token_file import Tokens
from swarmtrain.trainer.runtime import Runtime

LOG = logging.getLogger("swarmtrain")
_RECORD = "tokens-seen.json"
_SECONDS = 5.0
_LONG = 2.0
_PIECE = 1 << 20
"""Tokens that are looked at at once."""


@dataclass(frozen=True)
class Seen:
    """What was seen of one file."""

    size: int
    """Bytes."""
    modified: int
    """Nanoseconds since the epoch."""
    looked_at: int = 0
    """Bytes."""
    highest: int = -1
    """The highest token in these."""

    def joined(self, other: Seen) -> Seen:
        """Return what this look at the file and another have seen."""
        return replace(self, looked_at=self.looked_at + other.looked_at, highest=max(self.highest, other.highest))


def has_room(dtype: np.dtype[Any], vocab_size: int) -> bool:
    """Return whether numbers of `dtype` can be tokens outside the vocabulary."""
    return dtype.kind == "i" or np.iinfo(dtype).max >= vocab_size


def check(tokens: Tokens, vocab_size: int, where: str = "", first: int | None = None) -> int:
    """Return the highest of `tokens`. Raises DataError if one is outside the vocabulary; `first`: where the first is in its file."""
    whole = tokens.view(tokens.dtype.str.replace("i", "u"))  # so that what is negative is high
    highest = int(whole.max())
    if highest < vocab_size:
        return highest
    at = int(whole.argmax())
    place = "" if first is None else f", at position {first + at:,}"
    raise DataError(
        f"is {vocab_size}, and token {int(tokens[at])} is in the data{where}{place}",
        place="config transformer_architecture.vocab_size",
        hint="it is one more than the highest token that there can be; or is it the data of another tokenizer?",
    )


def check_tokenizer(file: MemoryMap, vocab_size: int) -> None:
    """Raise DataError if `file` says that its tokenizer has more tokens than the vocabulary."""
    tokenizer = file.meta.get("prepared", {}).get("tokenizer", {})
    if (size := tokenizer.get("vocab_size", 0)) > vocab_size:
        raise DataError(
            f"is {vocab_size}, and {tokenizer['name']}, which made the tokens of {file.prefix}, has {size}",
            place="config transformer_architecture.vocab_size",
            hint=f"transformer_architecture.vocab_size: {size}, or more",
        )


def look_through(here: Runtime, files: Sequence[MemoryMap], seconds: float = _SECONDS) -> None:
    """Look for tokens outside the vocabulary in `files`, each once, for `seconds` at most. Called by all ranks together.

    Raises DataError if there is one, TrainingError if a file cannot be read.
    """
    vocab_size, save_dir = here.config.transformer_architecture.vocab_size, here.config.trainer.save_dir
    by_name = {str(file.prefix): file for file in files if has_room(file.tokens.dtype, vocab_size)}
    if not by_name:
        return
    record = save_dir / _RECORD if save_dir else None
    unseen = agreement.by_first_rank(lambda: _unseen(by_name, _read(record), vocab_size))
    if not unseen:
        return
    begun = time.monotonic()
    parts = agreement.by_every_rank(lambda: _look([by_name[name] for name in unseen], here, begun + seconds))
    if here.first:
        seen = {name: reduce(Seen.joined, found) for name, *found in zip(unseen, *parts, strict=True)}
        _tell(seen, time.monotonic() - begun)
        _write(record, {**_read(record), **seen})


def _unseen(files: Mapping[str, MemoryMap], known: Mapping[str, Seen], vocab_size: int) -> list[str]:
    """Return those of `files` that have not been looked at as they are now."""
    return [
        name
        for name, file in files.items()
        if name not in known or known[name].highest >= vocab_size or replace(known[name], looked_at=0, highest=-1) != _nothing_of(file)
    ]


def _look(files: Sequence[MemoryMap], here: Runtime, deadline: float) -> list[Seen]:
    """Look at this rank's pieces of `files` until the `deadline`; return what was seen of each.

    Pieces come in an order as if they were drawn, so that wherever it ends, they are a fair sample of all.
    """
    vocab_size = here.config.transformer_architecture.vocab_size
    seen = [_nothing_of(file) for file in files]
    pieces = [(number, start) for number, file in enumerate(files) for start in range(0, len(file.tokens), _PIECE)]
    mine = order.permuted(np.arange(here.rank, len(pieces), here.size), len(pieces), key=0).tolist()
    for piece, following in pairwise([*mine, None]):
        if time.monotonic() > deadline:
            break
        if following is not None:
            number, start = pieces[following]
            files[number].tokens.expect(start, min(_PIECE, len(files[number].tokens) - start))
        number, start = pieces[piece]
        tokens = files[number].tokens[start : start + _PIECE]
        highest = check(tokens, vocab_size, f": {files[number].prefix}", start)
        seen[number] = seen[number].joined(Seen(0, 0, tokens.nbytes, highest))
    return seen


def _nothing_of(file: MemoryMap) -> Seen:
    try:
        facts = file.path.stat()
    except OSError as error:
        raise TrainingError(f"{file.path}: {reason(error)}", place="config data", hint="is the disk gone?") from None
    return Seen(facts.st_size, facts.st_mtime_ns)


def _tell(seen: Mapping[str, Seen], seconds: float) -> None:
    size, looked_at = (sum(values) for values in zip(*((each.size, each.looked_at) for each in seen.values()), strict=True))
    if looked_at < size:
        LOG.info(
            "looked at %.0f %% of the data for tokens outside the vocabulary; the rest is checked as it is read", 100 * looked_at / size
        )
    elif seconds > _LONG:
        LOG.info("looked at all data for tokens outside the vocabulary: %.1f GB in %.1f s", looked_at / 1e9, seconds)


def _read(record: Path | None) -> dict[str, Seen]:
    """Return what is remembered; nothing if it cannot be read, for then it is only looked at again."""
    try:
        return {name: Seen(**values) for name, values in json.loads(record.read_text()).items()} if record else {}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(record: Path | None, seen: Mapping[str, Seen]) -> None:
    if record:
        with suppress(OSError):  # of a disk that is full, checkpoints are the ones to tell
            text = json.dumps({name: asdict(each) for name, each in seen.items()}, indent=1) + "\n"
            write_all({record: (text.encode(), OPEN)})
