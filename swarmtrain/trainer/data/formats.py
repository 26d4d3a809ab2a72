"""File formats of token files: how they store tokens, token dtype and document boundaries. P is the path prefix of the files.

memory_map     Aleph Alpha's Scaling, and swarmtrain: P.bin, P.idx and P.meta.json; swarmtrain also supports P.mask.bin
megatron       Megatron-LM: P.bin, and P.idx, which begins with MMIDIDX
llm.c          llm.c: P.bin, with a header of 256 int32
nanogpt        nanoGPT: P.bin, 16-bit tokens without a header

All except nanogpt are detected automatically. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.config.schema.data import TokenFileFormat
from swarmtrain.config.user_files import open_regular_file, read_regular_file
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import MappedArray, PreadArray, Tokens

_MEGATRON_MAGIC = b"MMIDIDX\0\0"
_MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LLM_C_DTYPES = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_LLM_C_HEADER_BYTES = 1024
_SCAN_BLOCK_TOKENS = 1 << 24
"""Number of tokens that are scanned at a time for the token that separates documents."""

FileArrayType = type[MappedArray] | type[PreadArray]


@dataclass(frozen=True)
class TokenFileContents:
    """The contents of the token files with one prefix."""

    format: TokenFileFormat
    tokens: MappedArray | PreadArray
    documents: Tokens
    """For each document, the index of its first token and its number of tokens: shape (documents, 2)."""
    meta: dict[str, Any] = field(default_factory=dict)
    loss_mask: MappedArray | PreadArray | None = None
    """Loss mask: 1 for each token that contributes to the loss as a target, else 0; None if all tokens do."""


def open_token_files(
    prefix: Path, array_type: FileArrayType, format: TokenFileFormat = TokenFileFormat.auto, document_token: int | None = None
) -> TokenFileContents:
    """Open the token files of `prefix`, stored in `format`, as arrays of `array_type`.

    `document_token`: id of the token that separates documents, for formats without an index. Raises OSError if a file cannot be read,
    ValueError if the files are invalid or do not match each other, TrainingError if the format cannot be detected.
    """
    actual_format = detect_token_file_format(prefix) if format is TokenFileFormat.auto else format
    if document_token is not None and actual_format in (TokenFileFormat.memory_map, TokenFileFormat.megatron):
        raise ValueError("has an index: data.document_token applies only to formats without an index")
    return _READERS[actual_format](prefix, array_type, document_token)


def detect_token_file_format(prefix: Path) -> TokenFileFormat:
    """Return the format of the token files of `prefix`.

    Raises TrainingError if it cannot be detected, ValueError if the files are of different formats, OSError if a file cannot be read.
    """
    megatron = (
        build_token_file_path(prefix, "idx").exists()
        and _read_header(build_token_file_path(prefix, "idx"), len(_MEGATRON_MAGIC)) == _MEGATRON_MAGIC
    )
    if build_token_file_path(prefix, "meta.json").exists():
        if megatron:
            raise ValueError(
                f"{prefix.name}.idx has the megatron format, but {prefix.name}.meta.json belongs to an .idx of the memory_map format"
            )
        return TokenFileFormat.memory_map
    if megatron:
        return TokenFileFormat.megatron
    if build_token_file_path(prefix, "idx").exists() or not build_token_file_path(prefix, "bin").exists():
        return TokenFileFormat.memory_map
    if _read_magic_number(build_token_file_path(prefix, "bin")) in {magic for magic, _ in _LLM_C_DTYPES}:
        return TokenFileFormat.llm_c
    raise TrainingError(
        f"{prefix}: there is no .idx, and .bin has no header that identifies its format",
        place="config data",
        hint="for nanoGPT files (16-bit tokens only), set data.format: nanogpt",
    )


def build_token_file_path(prefix: Path, suffix: str) -> Path:
    """Return the path PREFIX.SUFFIX of a token file."""
    return prefix.with_name(f"{prefix.name}.{suffix}")


def _open_memory_map(prefix: Path, array_type: FileArrayType, _: int | None) -> TokenFileContents:
    meta: dict[str, Any] = json.loads(read_regular_file(build_token_file_path(prefix, "meta.json")))
    tokens = array_type(build_token_file_path(prefix, "bin"), _parse_integer_dtype(meta["dtype"]))
    index = array_type(build_token_file_path(prefix, "idx"), _parse_integer_dtype(meta["index_dtype"])).array
    documents: Tokens = index[: len(index) // 2 * 2].reshape(-1, 2)
    indexed = int(documents[-1].sum()) if len(documents) else 0
    if len(index) != 2 * meta.get("document_count", -1) or indexed != len(tokens):
        raise ValueError(CORRUPT_INDEX_MESSAGE)
    loss_mask = array_type(build_token_file_path(prefix, "mask.bin"), np.dtype(np.uint8)) if meta.get("loss_mask") else None
    if loss_mask is not None and len(loss_mask) != len(tokens):
        raise ValueError(f"{prefix.name}.mask.bin has {len(loss_mask):,} bytes for {len(tokens):,} tokens; one of the files is corrupt")
    return TokenFileContents(TokenFileFormat.memory_map, tokens, documents, meta, loss_mask)


def _open_megatron_files(prefix: Path, array_type: FileArrayType, _: int | None) -> TokenFileContents:
    """Open token files of Megatron-LM.

    A document consists of one or more sequences. The index has the length and the byte offset of each sequence, and the index of the first
    sequence of each document.
    """
    index_path = build_token_file_path(prefix, "idx")
    header = _read_header(index_path, 34)
    if len(header) < 34 or not header.startswith(_MEGATRON_MAGIC):
        raise ValueError(f"{index_path.name} does not begin with Megatron's header")
    version, dtype_code, sequences, entries = struct.unpack("<QBQQ", header[9:])
    if version != 1:
        raise ValueError(f"{index_path.name} has version {version}, but only version 1 is supported")
    if dtype_code not in _MEGATRON_DTYPES:
        raise ValueError(f"{index_path.name} has tokens of dtype code {dtype_code}, which is not an integer dtype")
    dtype = np.dtype(_MEGATRON_DTYPES[dtype_code])
    index = array_type(index_path, np.dtype(np.uint8), 34).array
    boundaries = np.cumsum([0, 4 * sequences, 8 * sequences, 8 * entries])
    if len(index) not in (boundaries[-1], boundaries[-1] + sequences):  # multimodal files have one more byte per sequence
        raise ValueError(f"{index_path.name} has {len(index) + 34} bytes, but its header specifies {int(boundaries[-1]) + 34}")
    lengths, pointers, ends = (
        np.frombuffer(index[first:end].tobytes(), dtype=item_dtype)
        for first, end, item_dtype in zip(boundaries, boundaries[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    if not entries or ends[0] or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise ValueError(f"{index_path.name} has documents that do not match its {sequences} sequences in order")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise ValueError(f"{index_path.name}: the sequences are not contiguous, or their offsets do not match the dtype {dtype}")
    tokens = array_type(build_token_file_path(prefix, "bin"), dtype)
    if starts[-1] != len(tokens):
        raise ValueError(CORRUPT_INDEX_MESSAGE)
    return TokenFileContents(TokenFileFormat.megatron, tokens, _build_document_table(starts[ends]))


def _open_llm_c_files(prefix: Path, array_type: FileArrayType, document_token: int | None) -> TokenFileContents:
    tokens_path = build_token_file_path(prefix, "bin")
    header = _read_header(tokens_path, _LLM_C_HEADER_BYTES)
    if len(header) < _LLM_C_HEADER_BYTES:
        raise ValueError(f"{tokens_path.name} ends within its header")
    magic, version, count = struct.unpack("<3i", header[:12])
    if (magic, version) not in _LLM_C_DTYPES:
        known_versions = ", ".join(f"{magic} and {version}" for magic, version in _LLM_C_DTYPES)
        raise ValueError(f"{tokens_path.name} begins with {magic} and {version}; llm.c files begin with {known_versions}")
    tokens = array_type(tokens_path, np.dtype(_LLM_C_DTYPES[magic, version]), _LLM_C_HEADER_BYTES)
    if len(tokens) != count:
        raise ValueError(f"{tokens_path.name} has {len(tokens):,} tokens, but its header specifies {count:,}; the file is corrupt")
    return TokenFileContents(TokenFileFormat.llm_c, tokens, _split_documents(tokens, document_token, offset=0))


def _open_nanogpt_files(prefix: Path, array_type: FileArrayType, document_token: int | None) -> TokenFileContents:
    tokens_path = build_token_file_path(prefix, "bin")
    if _read_magic_number(tokens_path) in {magic for magic, _ in _LLM_C_DTYPES}:
        raise ValueError(f"{tokens_path.name} has an llm.c header, but a nanogpt file was expected; set data.format: llm.c")
    tokens = array_type(tokens_path, np.dtype("uint16"))
    return TokenFileContents(TokenFileFormat.nanogpt, tokens, _split_documents(tokens, document_token, offset=1))


def _split_documents(tokens: MappedArray | PreadArray, document_token: int | None, offset: int) -> Tokens:
    """Return the start index and the length, in tokens, of each document in `tokens`: shape (documents, 2).

    A document begins `offset` positions after each `document_token`; None: all tokens are one document.
    """
    starts = []
    for first in range(0, len(tokens), _SCAN_BLOCK_TOKENS) if document_token is not None else ():
        starts.append(np.flatnonzero(tokens[first : first + _SCAN_BLOCK_TOKENS] == document_token) + first + offset)
    return _build_document_table(np.unique(np.concatenate([[0], *starts, [len(tokens)]]).astype(np.int64)))


def _build_document_table(boundaries: Tokens) -> Tokens:
    return np.stack([boundaries[:-1], np.diff(boundaries)], axis=1)


def _parse_integer_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "iu":
        raise ValueError(f"the dtype {name} in its meta.json is not an integer dtype")
    return dtype


def _read_header(file_path: Path, size: int) -> bytes:
    with open_regular_file(file_path) as stream:
        return stream.read(size)


def _read_magic_number(file_path: Path) -> int:
    return int.from_bytes(_read_header(file_path, 4), "little", signed=True)


CORRUPT_INDEX_MESSAGE = "its index does not match its tokens; one of the files is corrupt"
_READERS: dict[TokenFileFormat, Callable[[Path, FileArrayType, int | None], TokenFileContents]] = {
    TokenFileFormat.memory_map: _open_memory_map,
    TokenFileFormat.megatron: _open_megatron_files,
    TokenFileFormat.llm_c: _open_llm_c_files,
    TokenFileFormat.nanogpt: _open_nanogpt_files,
}
