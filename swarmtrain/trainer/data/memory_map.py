"""Token files of Aleph Alpha's Scaling, memory-mapped: a prefix P stands for three files.

P.bin          the tokens of all documents, one after another
P.idx          for each document two integers: its first token and its length, in tokens
P.meta.json    {"dtype": "uint8", "index_dtype": "int64", "document_count": 1234}
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmtrain.errors import TrainingError

Tokens = npt.NDArray[Any]
_ANEW = "its .bin, .idx and .meta.json are written together; write all three anew"


class MemoryMap:
    """The tokens of one prefix. Nothing is read until it is asked for."""

    def __init__(self, prefix: Path) -> None:
        """Open the files of `prefix`. Raises TrainingError that names what is missing or does not fit."""
        self.prefix = prefix
        try:
            self.meta: dict[str, Any] = json.loads(_file(prefix, "meta.json").read_text())
            self.tokens: Tokens = np.memmap(_file(prefix, "bin"), dtype=self.meta["dtype"], mode="r")
            index: Tokens = np.memmap(_file(prefix, "idx"), dtype=self.meta["index_dtype"], mode="r")
        except FileNotFoundError as error:
            raise TrainingError(
                f"{error.filename}: no such file", place="config data", hint="paths are relative to the folder the run is in"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{prefix}: is no memory-mapped token file: {error}", place="config data", hint=_ANEW) from None
        self.documents: Tokens = index[: len(index) // 2 * 2].reshape(-1, 2)
        fits = len(index) == 2 * self.meta.get("document_count", -1)
        if not fits or (len(index) and self.documents[-1].sum() > len(self.tokens)):
            raise TrainingError(f"{prefix}: its index does not fit its tokens; one of the files is torn", place="config data", hint=_ANEW)


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


def _file(prefix: Path, ending: str) -> Path:
    return prefix.with_name(f"{prefix.name}.{ending}")


def _aside(path: Path) -> Path:
    # With the pid, since two nodes on one machine may prepare the same files at once.
    return path.with_name(f".{path.name}.{os.getpid()}")
