"""Whether token files are whole: their hashes where they are recorded, every token, every document."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from swarmtrain.config.data import Format
from swarmtrain.config.files import reason
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.token_file import Mapped, Read
from swarmtrain.trainer.prepare import sources

_PIECE = 1 << 22
_PLACE = "data verify"
_ANEW = "prepare it anew, or copy it anew from where it is whole"


def verify(prefix: Path, *, format: Format = Format.auto, document_token: int | None = None) -> str:
    """Read all files of `prefix`; return what they hold, in a line. Raises TrainingError that says what is wrong with them."""
    file = MemoryMap(prefix, use_mmap=False, format=format, document_token=document_token)
    file.check_documents()
    try:
        hashed = [_hash(prefix, ending, str(recorded)) for ending, recorded in file.meta.get("sha256", {}).items()]
        lowest, highest, count = _range(file)
        counted = None if file.mask is None else _counted(file.prefix, file.mask)
    except OSError as error:
        raise TrainingError(f"{error.filename or prefix}: {reason(error)}", place=_PLACE, hint=_ANEW) from None
    size = file.meta.get("prepared", {}).get("tokenizer", {}).get("vocab_size")
    if lowest < 0 or (size is not None and highest >= size):
        outside = lowest if lowest < 0 else highest
        raise TrainingError(f"{prefix}: has token {outside}, and its tokenizer has {size or 'none below 0'}", place=_PLACE, hint=_ANEW)
    if count != file.meta.get("token_count", count):
        raise TrainingError(
            f"{prefix}: has {count:,} tokens, and its meta file says {file.meta['token_count']:,}", place=_PLACE, hint=_ANEW
        )
    if counted != file.meta.get("counted_tokens", counted):
        raise TrainingError(
            f"{prefix}: {counted:,} tokens count in the loss, and its meta file says {file.meta['counted_tokens']:,}",
            place=_PLACE,
            hint=_ANEW,
        )
    empty = int((file.documents[:, 1] == 0).sum())
    told = [
        f"{prefix}: {file.format}, {len(file.documents):,} documents, {count:,} tokens of {file.tokens.dtype}, from {lowest} to {highest}",
        *([f"{counted:,} count in the loss"] if counted is not None else []),
        *([f"{empty:,} documents are empty"] if empty else []),
        f"hashes of {' '.join(hashed)} as recorded" if hashed else "no hashes are recorded",
    ]
    return "; ".join(told)


def _hash(prefix: Path, ending: str, recorded: str) -> str:
    path = formats.path(prefix, ending)
    if sources.digest(str(path)) != recorded:
        raise TrainingError(f"{path}: is not what was written: its hash is another", place=_PLACE, hint=_ANEW)
    return path.name


def _range(file: MemoryMap) -> tuple[int, int, int]:
    """Return the lowest and the highest token, and how many there are."""
    lowest, highest = np.iinfo(np.int64).max, -1
    for first in range(0, len(file.tokens), _PIECE):
        tokens = file.tokens[first : first + _PIECE]
        lowest, highest = min(lowest, int(tokens.min())), max(highest, int(tokens.max()))
    return lowest, highest, len(file.tokens)


def _counted(prefix: Path, mask: Mapped | Read) -> int:
    """Return how many tokens count in the loss. Raises TrainingError if the mask has anything but 0 and 1."""
    counted = 0
    for first in range(0, len(mask), _PIECE):
        piece = mask[first : first + _PIECE]
        if piece.max() > 1:
            raise TrainingError(f"{prefix}.mask.bin has {int(piece.max())}, and only 0 and 1 mean something", place=_PLACE, hint=_ANEW)
        counted += int(np.count_nonzero(piece))
    return counted
