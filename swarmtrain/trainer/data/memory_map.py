"""Token files of Aleph Alpha's Scaling, memory-mapped: a prefix P stands for three files.

P.bin          the tokens of all documents, one after another
P.idx          for each document two integers: its first token and its length, in tokens
P.meta.json    {"dtype": "uint8", "index_dtype": "int64", "document_count": 1234}
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

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Mapped, Read, Tokens

Ids = npt.NDArray[np.int64]
_ANEW = "its .bin, .idx and .meta.json are written together; write all three anew"


class MemoryMap:
    """The tokens of one prefix, or of some of its documents. Nothing is read until it is asked for."""

    def __init__(self, prefix: Path, *, use_mmap: bool = True) -> None:
        """Open the files of `prefix`; without `use_mmap` the index is kept in memory, and tokens are read by calls.

        Raises TrainingError that names what is missing or does not fit.
        """
        kind = Mapped if use_mmap else Read
        self.prefix = prefix
        try:
            self.meta: dict[str, Any] = json.loads(_file(prefix, "meta.json").read_text())
            self.tokens: Mapped | Read = kind(_file(prefix, "bin"), _whole(self.meta["dtype"]))
            index = kind(_file(prefix, "idx"), _whole(self.meta["index_dtype"])).array
        except FileNotFoundError as error:
            raise TrainingError(
                f"{error.filename}: no such file", place="config data", hint="paths are relative to the folder the run is in"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{prefix}: is no memory-mapped token file: {error}", place="config data", hint=_ANEW) from None
        self.documents: Tokens = index[: len(index) // 2 * 2].reshape(-1, 2)
        indexed = int(self.documents[-1].sum()) if len(self.documents) else 0
        if len(index) != 2 * self.meta.get("document_count", -1) or indexed != len(self.tokens):
            raise TrainingError(f"{prefix}: its index does not fit its tokens; one of the files is torn", place="config data", hint=_ANEW)
        self.first, self.end = 0, len(self.tokens)
        """Its tokens are those from `first` to before `end`."""

    @property
    def path(self) -> Path:
        """The file of its tokens."""
        return _file(self.prefix, "bin")

    def part(self, low: float, high: float) -> Self:
        """Return the documents between the fractions `low` and `high` of all, by their number."""
        first, end = round(low * len(self.documents)), round(high * len(self.documents))
        part = copy.copy(self)
        part.documents = self.documents[first:end]
        part.first = int(part.documents[0, 0]) if end > first else 0
        part.end = int(part.documents[-1].sum()) if end > first else 0
        return part

    def document_at(self, tokens: Ids) -> Ids:
        """Return the number of the last document that begins at or before each of `tokens`."""
        # Not numpy's own search, which would copy the column of starts: it is as long as there are documents.
        low, high = np.zeros_like(tokens), np.full_like(tokens, len(self.documents))
        for _ in range(len(self.documents).bit_length()):
            middle = (low + high) // 2
            before = self.documents[np.minimum(middle, len(self.documents) - 1), 0] <= tokens
            low, high = np.where(before & (low < high), middle + 1, low), np.where(before, high, middle)
        return low - 1


def exists(prefix: Path) -> bool:
    """Say whether there are files of `prefix`."""
    return _file(prefix, "meta.json").exists()


def write(prefix: Path, documents: Iterable[Tokens], dtype: str, extra: Mapping[str, Any] | None = None) -> None:
    """Write `documents`, arrays of tokens, under `prefix`. `extra` goes into the meta file, which comes last:
    whoever finds it finds the rest complete."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    index, start = [], 0
    bin_file, idx_file, meta_file = (_file(prefix, ending) for ending in ("bin", "idx", "meta.json"))
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


def _whole(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "iu":
        raise ValueError(f"{name} is no kind of whole numbers")
    return dtype


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{ending}")


def _aside(path: Path) -> Path:
    # With the pid, since two nodes on one machine may prepare the same files at once.
    return path.with_name(f".{path.name}.{os.getpid()}")
