"""Verify token files: their recorded hashes, all tokens, and all document boundaries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarmtrain.config.schema.data import TokenFileFormat
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data import formats
from swarmtrain.trainer.data.memory_map import MemoryMap
from swarmtrain.trainer.data.token_file import MappedArray, PreadArray
from swarmtrain.trainer.tokenize import readers

_BLOCK_TOKENS = 1 << 22
_ERROR_PLACE = "data verify"
_REBUILD_HINT = "tokenize it again, or copy it again from an intact copy"


@dataclass(frozen=True)
class TokenFileSummary:
    """Contents of verified token files. str() returns one line."""

    prefix: str
    format: str
    documents: int
    empty_documents: int
    tokens: int
    dtype: str
    lowest_token: int
    highest_token: int
    loss_tokens: int | None
    """Number of tokens that count in the loss; None if the files have no loss mask."""
    verified_hashes: tuple[str, ...]
    """Names of the files whose recorded hash was verified."""

    def __str__(self) -> str:
        token_range = f"{self.tokens:,} tokens of {self.dtype}, from {self.lowest_token} to {self.highest_token}"
        return "; ".join(
            [
                f"{self.prefix}: {self.format}, {self.documents:,} documents, {token_range}",
                *([f"{self.loss_tokens:,} count in the loss"] if self.loss_tokens is not None else []),
                *([f"{self.empty_documents:,} documents are empty"] if self.empty_documents else []),
                f"hashes of {' '.join(self.verified_hashes)} as recorded" if self.verified_hashes else "no hashes are recorded",
            ]
        )


def verify_token_files(
    prefix: Path, *, format: TokenFileFormat = TokenFileFormat.auto, document_token: int | None = None
) -> TokenFileSummary:
    """Verify all token files of `prefix`, and return a summary of their contents.

    `document_token`: id of the token that separates documents, for formats without an index. Raises TrainingError for the first fault.
    """
    file = MemoryMap(prefix, use_mmap=False, format=format, document_token=document_token)
    file.check_document_boundaries()
    try:
        hashed_names = [_verify_hash(prefix, suffix, str(expected_hash)) for suffix, expected_hash in file.meta.get("sha256", {}).items()]
        lowest, highest, count = _compute_token_range(file)
        loss_tokens = None if file.loss_mask is None else _count_loss_tokens(file.prefix, file.loss_mask)
    except OSError as error:
        raise TrainingError(f"{error.filename or prefix}: {describe_os_error(error)}", place=_ERROR_PLACE, hint=_REBUILD_HINT) from None
    vocab_size = file.meta.get("prepared", {}).get("tokenizer", {}).get("vocab_size")
    if lowest < 0 or (vocab_size is not None and highest >= vocab_size):
        invalid_token = lowest if lowest < 0 else highest
        raise TrainingError(
            f"{prefix}: has token {invalid_token}, but tokens must be at least 0 and less than {vocab_size or 'the vocabulary size'}",
            place=_ERROR_PLACE,
            hint=_REBUILD_HINT,
        )
    if count != file.meta.get("token_count", count):
        raise TrainingError(
            f"{prefix}: has {count:,} tokens, but its meta.json specifies {file.meta['token_count']:,}",
            place=_ERROR_PLACE,
            hint=_REBUILD_HINT,
        )
    if loss_tokens != file.meta.get("loss_tokens", loss_tokens):
        raise TrainingError(
            f"{prefix}: {loss_tokens:,} tokens count in the loss, but its meta.json specifies {file.meta['loss_tokens']:,}",
            place=_ERROR_PLACE,
            hint=_REBUILD_HINT,
        )
    return TokenFileSummary(
        prefix=str(prefix),
        format=str(file.format),
        documents=len(file.documents),
        empty_documents=int((file.documents[:, 1] == 0).sum()),
        tokens=count,
        dtype=str(file.tokens.dtype),
        lowest_token=lowest,
        highest_token=highest,
        loss_tokens=loss_tokens,
        verified_hashes=tuple(hashed_names),
    )


def _verify_hash(prefix: Path, suffix: str, expected_hash: str) -> str:
    path = formats.build_token_file_path(prefix, suffix)
    if readers.hash_file(str(path)) != expected_hash:
        raise TrainingError(f"{path}: has changed since it was written: its hash does not match", place=_ERROR_PLACE, hint=_REBUILD_HINT)
    return path.name


def _compute_token_range(token_file: MemoryMap) -> tuple[int, int, int]:
    """Return the lowest token, the highest token, and the number of tokens in `token_file`."""
    lowest, highest = np.iinfo(np.int64).max, -1
    for first in range(0, len(token_file.tokens), _BLOCK_TOKENS):
        tokens = token_file.tokens[first : first + _BLOCK_TOKENS]
        lowest, highest = min(lowest, int(tokens.min())), max(highest, int(tokens.max()))
    return lowest, highest, len(token_file.tokens)


def _count_loss_tokens(prefix: Path, loss_mask: MappedArray | PreadArray) -> int:
    """Return the number of tokens that contribute to the loss. Raises TrainingError if the mask has values other than 0 and 1."""
    loss_tokens = 0
    for first in range(0, len(loss_mask), _BLOCK_TOKENS):
        block = loss_mask[first : first + _BLOCK_TOKENS]
        if block.max() > 1:
            raise TrainingError(
                f"{prefix}.mask.bin has the value {int(block.max())}, but only 0 and 1 are valid", place=_ERROR_PLACE, hint=_REBUILD_HINT
            )
        loss_tokens += int(np.count_nonzero(block))
    return loss_tokens
