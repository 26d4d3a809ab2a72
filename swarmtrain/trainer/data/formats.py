"""What the files of a prefix P are: whose they are, which type their tokens have, and where its documents begin and end.

memory_map     Aleph Alpha's Scaling, and ours: P.bin, P.idx and P.meta.json; ours can have P.mask.bin
megatron       Megatron-LM: P.bin, and P.idx, which begins with MMIDIDX
llm.c          llm.c: P.bin, with a header of 256 numbers
nanogpt        nanoGPT: P.bin, tokens of 16 bits and nothing else

All but the last tell themselves by what lies there. Numbers are little-endian in all.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swarmtrain.config.data import Format
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.data.token_file import Mapped, Read, Tokens

_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
_LLM_C_HEADER = 1024
_PIECE = 1 << 24
"""Tokens that are looked at at once."""

Kind = type[Mapped] | type[Read]


@dataclass(frozen=True)
class Contents:
    """What lies under a prefix."""

    format: Format
    tokens: Mapped | Read
    documents: Tokens
    """Of each document two numbers: its first token, and how many it has."""
    meta: dict[str, Any] = field(default_factory=dict)
    mask: Mapped | Read | None = None
    """For each token 1 if it counts in the loss as a target, else 0; None if all count."""


def read(prefix: Path, kind: Kind, format: Format = Format.auto, document_token: int | None = None) -> Contents:
    """Open the files of `prefix` as `kind`. Raises OSError, or ValueError that says what does not fit; TrainingError if
    the format is not known."""
    found = recognised(prefix) if format is Format.auto else format
    if document_token is not None and found in (Format.memory_map, Format.megatron):
        raise ValueError("has an index of its own: data.document_token is for files that have none")
    return _READERS[found](prefix, kind, document_token)


def recognised(prefix: Path) -> Format:
    """Return which format the files of `prefix` have. Raises OSError, or ValueError or TrainingError if that cannot be told."""
    megatron = path(prefix, "idx").exists() and _begins(path(prefix, "idx"), len(_MEGATRON)) == _MEGATRON
    if path(prefix, "meta.json").exists():
        if megatron:
            raise ValueError(f"{prefix.name}.idx is Megatron's, and {prefix.name}.meta.json belongs to another .idx")
        return Format.memory_map
    if megatron:
        return Format.megatron
    if path(prefix, "idx").exists() or not path(prefix, "bin").exists():
        return Format.memory_map
    if _magic(path(prefix, "bin")) in {magic for magic, _ in _LLM_C}:
        return Format.llm_c
    raise TrainingError(
        f"{prefix}: there is no .idx, and .bin has no header that says what it is",
        place="config data",
        hint="if it is nanoGPT's, tokens of 16 bits and nothing else: data.format: nanogpt",
    )


def path(prefix: Path, ending: str) -> Path:
    """Return the file of `prefix` with this ending."""
    return prefix.with_name(f"{prefix.name}.{ending}")


def _memory_map(prefix: Path, kind: Kind, _: int | None) -> Contents:
    meta: dict[str, Any] = json.loads(path(prefix, "meta.json").read_text())
    tokens = kind(path(prefix, "bin"), _whole(meta["dtype"]))
    index = kind(path(prefix, "idx"), _whole(meta["index_dtype"])).array
    documents: Tokens = index[: len(index) // 2 * 2].reshape(-1, 2)
    indexed = int(documents[-1].sum()) if len(documents) else 0
    if len(index) != 2 * meta.get("document_count", -1) or indexed != len(tokens):
        raise ValueError(TORN)
    mask = kind(path(prefix, "mask.bin"), np.dtype(np.uint8)) if meta.get("loss_mask") else None
    if mask is not None and len(mask) != len(tokens):
        raise ValueError(f"{prefix.name}.mask.bin has {len(mask):,} bytes for {len(tokens):,} tokens; one of the files is torn")
    return Contents(Format.memory_map, tokens, documents, meta, mask)


def _megatron(prefix: Path, kind: Kind, _: int | None) -> Contents:
    """A document is one sequence or several, and a sequence is where its pointer, in bytes, says."""
    file = path(prefix, "idx")
    header = _begins(file, 34)
    if len(header) < 34 or not header.startswith(_MEGATRON):
        raise ValueError(f"{file.name} does not begin as Megatron's do")
    version, code, sequences, entries = struct.unpack("<QBQQ", header[9:])
    if version != 1:
        raise ValueError(f"{file.name} has version {version}, and only 1 is known")
    if code not in _MEGATRON_TYPES:
        raise ValueError(f"{file.name} has tokens of type {code}, which is none of whole numbers")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    index = kind(file, np.dtype(np.uint8), 34).array
    cuts = np.cumsum([0, 4 * sequences, 8 * sequences, 8 * entries])
    if len(index) not in (cuts[-1], cuts[-1] + sequences):  # multimodal ones have a byte more for each sequence
        raise ValueError(f"{file.name} has {len(index) + 34} bytes, and {int(cuts[-1]) + 34} are what its header says")
    lengths, pointers, ends = (
        np.frombuffer(index[first:end].tobytes(), dtype=of) for first, end, of in zip(cuts, cuts[1:], ("<i4", "<i8", "<i8"), strict=False)
    )
    if not entries or ends[0] or ends[-1] != sequences or (np.diff(ends) < 0).any():
        raise ValueError(f"{file.name} has documents that are not its {sequences} sequences in their order")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if (lengths < 0).any() or (pointers != starts[:-1] * dtype.itemsize).any():
        raise ValueError(
            f"{file.name} has sequences that do not follow each other, or are not where its type of numbers, {dtype}, puts them"
        )
    tokens = kind(path(prefix, "bin"), dtype)
    if starts[-1] != len(tokens):
        raise ValueError(TORN)
    return Contents(Format.megatron, tokens, _between(starts[ends]))


def _llm_c(prefix: Path, kind: Kind, document_token: int | None) -> Contents:
    file = path(prefix, "bin")
    header = _begins(file, _LLM_C_HEADER)
    if len(header) < _LLM_C_HEADER:
        raise ValueError(f"{file.name} ends within its header")
    magic, version, count = struct.unpack("<3i", header[:12])
    if (magic, version) not in _LLM_C:
        known = ", ".join(f"{magic} and {version}" for magic, version in _LLM_C)
        raise ValueError(f"{file.name} begins with {magic} and {version}; llm.c's begin with {known}")
    tokens = kind(file, np.dtype(_LLM_C[magic, version]), _LLM_C_HEADER)
    if len(tokens) != count:
        raise ValueError(f"{file.name} has {len(tokens):,} tokens, and its header says {count:,}; it is torn")
    return Contents(Format.llm_c, tokens, _divided(tokens, document_token, after=0))


def _nanogpt(prefix: Path, kind: Kind, document_token: int | None) -> Contents:
    file = path(prefix, "bin")
    if _magic(file) in {magic for magic, _ in _LLM_C}:
        raise ValueError(f"{file.name} has the header of llm.c's")
    tokens = kind(file, np.dtype("uint16"))
    return Contents(Format.nanogpt, tokens, _divided(tokens, document_token, after=1))


def _divided(tokens: Mapped | Read, document_token: int | None, after: int) -> Tokens:
    """Return the documents of `tokens`, one of which begins at each `document_token`, or `after` it."""
    found = []
    for first in range(0, len(tokens), _PIECE) if document_token is not None else ():
        found.append(np.flatnonzero(tokens[first : first + _PIECE] == document_token) + first + after)
    return _between(np.unique(np.concatenate([[0], *found, [len(tokens)]]).astype(np.int64)))


def _between(ends: Tokens) -> Tokens:
    return np.stack([ends[:-1], np.diff(ends)], axis=1)


def _whole(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "iu":
        raise ValueError(f"{name} is no kind of whole numbers")
    return dtype


def _begins(file: Path, size: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(size)


def _magic(file: Path) -> int:
    return int.from_bytes(_begins(file, 4), "little", signed=True)


TORN = "its index does not fit its tokens; one of the files is torn"
_READERS: dict[Format, Callable[[Path, Kind, int | None], Contents]] = {
    Format.memory_map: _memory_map,
    Format.megatron: _megatron,
    Format.llm_c: _llm_c,
    Format.nanogpt: _nanogpt,
}
