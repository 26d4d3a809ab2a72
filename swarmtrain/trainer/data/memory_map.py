"""Memory-mapped token files. They are written in the format of Aleph Alpha's Scaling, with these files for a path prefix P:

P.bin          the tokens of all documents, one after another
P.idx          two integers per document: the index of its first token, and its number of tokens
P.meta.json    {"dtype": "uint8", "index_dtype": "int64", "document_count": 1234}
P.mask.bin     only if P.meta.json has "loss_mask": true: one byte per token, 1 if the token contributes to the loss, else 0
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

from swarmtrain.config.schema.data import TokenFileFormat
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.data.token_file import MappedArray, PreadArray, Tokens

Ids = npt.NDArray[np.int64]
_REBUILD_HINT = "rewrite all files of this prefix; they belong together"
_CHECK_BLOCK_DOCUMENTS = 1 << 20
"""Number of documents that are checked at a time."""


class MemoryMap:
    """The tokens and documents of one data set (the token files with one path prefix), or of a range of its documents.

    Tokens are read only when requested. Other formats are also supported: their document index is built when the files are
    opened, and uses 16 bytes of memory per document.
    """

    def __init__(
        self, prefix: Path, *, use_mmap: bool = True, format: TokenFileFormat = TokenFileFormat.auto, document_token: int | None = None
    ) -> None:
        """Open the token files of `prefix`.

        Without `use_mmap`, the index is kept in memory, and tokens are read with pread. `document_token`: id of the token that separates
        documents, for formats without an index. Raises TrainingError if a file is missing, or if the files do not match each other.
        """
        self.prefix = prefix
        try:
            contents = formats.open_token_files(prefix, MappedArray if use_mmap else PreadArray, format, document_token)
        except FileNotFoundError as error:
            raise TrainingError(
                f"{error.filename}: no such file",
                place="config data",
                hint="check the path; it is relative to the working directory of the run",
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(f"{prefix}: is not a readable token file: {error}", place="config data", hint=_REBUILD_HINT) from None
        self.format, self.tokens, self.documents, self.meta = contents.format, contents.tokens, contents.documents, contents.meta
        self.loss_mask = contents.loss_mask
        """Loss mask: 1 for each token that contributes to the loss as a target, else 0; None if all tokens do."""
        self.total_documents = len(self.documents)
        """Number of documents in the token files, including those that select_document_fraction() excludes."""
        self.token_start, self.token_end = 0, len(self.tokens)
        """Range of the selected documents' tokens in the file: from `token_start` up to, but not including, `token_end`."""

    @property
    def tokens_path(self) -> Path:
        """Path of the file with the tokens."""
        return formats.build_token_file_path(self.prefix, "bin")

    def select_document_fraction(self, start_fraction: float, end_fraction: float) -> Self:
        """Return a copy of this MemoryMap that is restricted to a range of the documents.

        `start_fraction`, `end_fraction`: start and end of the range, as fractions (0 to 1) of the number of documents.
        """
        first, end = round(start_fraction * len(self.documents)), round(end_fraction * len(self.documents))
        selection = copy.copy(self)
        selection.documents = self.documents[first:end]
        selection.token_start = int(selection.documents[0, 0]) if end > first else 0
        selection.token_end = int(selection.documents[-1].sum()) if end > first else 0
        return selection

    def check_document_boundaries(self) -> None:
        """Raise TrainingError if a document does not begin where the previous document ends, or has a negative length.

        Reads the whole index.
        """
        expected = self.token_start
        for number in range(0, len(self.documents), _CHECK_BLOCK_DOCUMENTS):
            documents = self.documents[number : number + _CHECK_BLOCK_DOCUMENTS].astype(np.int64)
            ends = documents.sum(axis=1)
            is_invalid = (documents[:, 1] < 0) | (ends > self.token_end) | (documents[:, 0] != np.concatenate([[expected], ends[:-1]]))
            if is_invalid.any():
                raise self._build_corruption_error(number + int(is_invalid.argmax()))
            expected = int(ends[-1])

    def find_documents_at(self, positions: Ids) -> Ids:
        """Return for each token position in `positions` the index of the last document that begins at or before it."""
        # np.searchsorted would copy the column of document starts, which has one entry per document.
        low, high = np.zeros_like(positions), np.full_like(positions, len(self.documents))
        for _ in range(len(self.documents).bit_length()):
            middle = (low + high) // 2
            is_before = self.documents[np.minimum(middle, len(self.documents) - 1), 0] <= positions
            low, high = np.where(is_before & (low < high), middle + 1, low), np.where(is_before, high, middle)
        return low - 1

    def _build_corruption_error(self, document_index: int) -> TrainingError:
        first, count = self.documents[document_index].tolist()
        message = f"{self.prefix}: its index is corrupt: document {document_index} has {count} tokens, starting at token {first}"
        return TrainingError(message, place="config data", hint=_REBUILD_HINT)


def has_token_files(prefix: Path) -> bool:
    """Return whether token files with this prefix exist."""
    return formats.build_token_file_path(prefix, "bin").exists()


def write_token_files(prefix: Path, documents: Iterable[Tokens], dtype: str, extra_meta: Mapping[str, Any] | None = None) -> None:
    """Write token files with `documents` (arrays of tokens) under `prefix`. All tokens contribute to the loss.

    `extra_meta` is added to PREFIX.meta.json. This file is published last: if it exists, the other files are complete.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    index, start = [], 0
    bin_file, idx_file, meta_file = (formats.build_token_file_path(prefix, suffix) for suffix in ("bin", "idx", "meta.json"))
    with _build_temporary_path(bin_file).open("wb") as file:
        for document in documents:
            file.write(np.asarray(document, dtype=dtype).tobytes())
            index.append((start, len(document)))
            start += len(document)
    _build_temporary_path(idx_file).write_bytes(np.array(index, dtype=np.int64).tobytes())
    meta = {"dtype": dtype, "index_dtype": "int64", "document_count": len(index), **(extra_meta or {})}
    _build_temporary_path(meta_file).write_text(json.dumps(meta, indent=1) + "\n")
    for path in (bin_file, idx_file, meta_file):
        _build_temporary_path(path).replace(path)


def _build_temporary_path(path: Path) -> Path:
    # Includes the pid, since two nodes on one machine may prepare the same files at the same time.
    return path.with_name(f".{path.name}.{os.getpid()}")
