"""Token files, memory-mapped. What is written is Aleph Alpha's Scaling's: a prefix P stands for three files.

P.bin          the tokens of all documents, one after another
P.idx          for each document two integers: its first token and its length, in tokens
P.meta.json    {"dtype": "uint8", "index_dtype": "int64", "document_count": 1234}
P.mask.bin     if the meta file has "loss_mask": true: a byte a token, 1 where the token counts in the loss, else 0
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from swarmtrain.config.data import Format
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.data.token_file import Mapped, Read, Tokens

Ids = npt.NDArray[np.int64]
_ANEW = "its files are written together; write all of them anew"
_PIECE = 1 << 20
"""Documents that are looked at at once."""


class MemoryMap:
    """The tokens of one prefix, or of some of its documents. Nothing is read until it is asked for.

    Files of other formats are read as well; their index is made at the start, and has 16 bytes of memory a document.
    """

    def __init__(self, prefix: Path, *, use_mmap: bool = True, format: Format = Format.auto, document_token: int | None = None) -> None:
        """Open the files of `prefix`; without `use_mmap` the index is kept in memory, and tokens are read by calls.

        `document_token` tells documents apart in files without an index. Raises TrainingError that names what is missing
        or does not fit.
        """
        self.prefix = prefix
        try:
            contents = formats.read(prefix, Mapped if use_mmap else Read, format, document_token)
        except FileNotFoundError as error:
            raise TrainingError(
                f"{error.filename}: no such file", place="config data", hint="paths are relative to the folder the run is in"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{prefix}: is no token file that can be read: {error}", place="config data", hint=_ANEW) from None
        self.format, self.tokens, self.documents, self.meta = contents.format, contents.tokens, contents.documents, contents.meta
        self.mask = contents.mask
        """For each token 1 if it counts in the loss as a target, else 0; None if all count."""
        self.count = len(self.documents)
        """The documents of the whole file."""
        self.first, self.end = 0, len(self.tokens)
        """Its tokens are those from `first` to before `end`."""

    @property
    def path(self) -> Path:
        """The file of its tokens."""
        return formats.path(self.prefix, "bin")

    def part(self, low: float, high: float) -> Self:
        """Return the documents between the fractions `low` and `high` of all, by their number."""
        first, end = round(low * len(self.documents)), round(high * len(self.documents))
        part = copy.copy(self)
        part.documents = self.documents[first:end]
        part.first = int(part.documents[0, 0]) if end > first else 0
        part.end = int(part.documents[-1].sum()) if end > first else 0
        return part

    def check_documents(self) -> None:
        """Raise TrainingError if a document is not where the one before it ends, or has less than no tokens. Reads the whole index."""
        expected = self.first
        for number in range(0, len(self.documents), _PIECE):
            documents = self.documents[number : number + _PIECE].astype(np.int64)
            ends = documents.sum(axis=1)
            wrong = (documents[:, 1] < 0) | (ends > self.end) | (documents[:, 0] != np.concatenate([[expected], ends[:-1]]))
            if wrong.any():
                raise self._torn(number + int(wrong.argmax()))
            expected = int(ends[-1])

    def document_at(self, tokens: Ids) -> Ids:
        """Return the number of the last document that begins at or before each of `tokens`."""
        # Not numpy's own search, which would copy the column of starts: it is as long as there are documents.
        low, high = np.zeros_like(tokens), np.full_like(tokens, len(self.documents))
        for _ in range(len(self.documents).bit_length()):
            middle = (low + high) // 2
            before = self.documents[np.minimum(middle, len(self.documents) - 1), 0] <= tokens
            low, high = np.where(before & (low < high), middle + 1, low), np.where(before, high, middle)
        return low - 1

    def _torn(self, number: int) -> TrainingError:
        first, count = self.documents[number].tolist()
        message = f"{self.prefix}: its index is torn: document {number} is said to have {count} tokens from {first} on"
        return TrainingError(message, place="config data", hint=_ANEW)


def exists(prefix: Path) -> bool:
    """Say whether there are files of `prefix`."""
    return formats.path(prefix, "bin").exists()


def write(prefix: Path, documents: Iterable[Tokens], dtype: str, extra: Mapping[str, Any] | None = None) -> None:
    """Write `documents`, arrays of tokens that all count in the loss, under `prefix`. `extra` goes into the meta file, which
    comes last: whoever finds it finds the rest complete."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    index, start = [], 0
    bin_file, idx_file, meta_file = (formats.path(prefix, ending) for ending in ("bin", "idx", "meta.json"))
    with _aside(bin_file).open("wb") as file:
        for document in documents:
            file.write(np.asarray(document, dtype=dtype).tobytes())
            index.append((start, len(document)))
            start += len(document)
    _aside(idx_file).write_bytes(np.array(index, dtype=np.int64).tobytes())
    meta = {"dtype": dtype, "index_dtype": "int64", "document_count": len(index), **(extra or {})}
    _aside(meta_file).write_text(json.dumps(meta, indent=1) + "\n")
    for path in (bin_file, idx_file, meta_file):
        _aside(path).replace(path)


def _aside(path: Path) -> Path:
    # With the pid, since two nodes on one machine may prepare the same files at once.
    return path.with_name(f".{path.name}.{os.getpid()}")
