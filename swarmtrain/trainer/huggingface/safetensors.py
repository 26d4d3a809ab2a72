"""Files in the format safetensors: a header in JSON with each tensor's type, size and place, and then their bytes.

They are written one tensor at a time, and read as views of the file, of which what is not used is never in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from swarmtrain.errors import CheckpointError

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_WHOLE = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_TYPES = {**{name: dtype for dtype, name in _NAMES.items()}, **_WHOLE}
_LENGTH = 8
"""Bytes that hold the header's length. The header itself is filled up to a multiple of as many."""
_LONGEST = 100_000_000
_TOLD = 1 << 20


def dtype(name: str | None) -> torch.dtype | None:
    """Return the type of numbers of this name, if there is one."""
    return next((one for one in _NAMES if str(one) == f"torch.{name}"), None)


class Kind(NamedTuple):
    """What a tensor is like."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


def write(path: Path, kinds: Mapping[str, Kind], tensor: Callable[[str], Tensor]) -> None:
    """Write a file of the tensors `kinds`, each of which `tensor` makes when it is its turn. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        begin, end = end, end + kind.nbytes
        header[name] = {"dtype": _NAMES[kind.dtype], "shape": list(kind.size), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _LENGTH)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(_LENGTH, "little") + text)
        for name, kind in kinds.items():
            values = tensor(name).to(kind.dtype).contiguous().reshape(-1).view(torch.uint8)
            file.write(values.numpy().data)


def read(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file as views of it. Raises CheckpointError if it is not whole or makes no sense."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH), "little")
            text = file.read(length) if length <= min(size, _LONGEST) else b""
        header = json.loads(text)
        data = torch.from_numpy(np.memmap(path, np.uint8, "c"))[_LENGTH + length :]
        return {name: _view(data, entry) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", place=str(path)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"is no whole file of safetensors: {error}", place=str(path), hint="download it again, or save it in other numbers"
        ) from None


def mark(path: Path) -> bytes:
    """Return what tells a file from another: its header, how long it is, and its last numbers. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TOLD))
            last = file.read()
            file.seek(0)
            return b"%d " % size + file.read(min(int.from_bytes(file.read(_LENGTH), "little"), _LONGEST)) + last
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", place=str(path)) from None


def _view(data: Tensor, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _TYPES:
        raise ValueError(f"its numbers are {entry['dtype']}, and there are {', '.join(_TYPES)}")
    kind = Kind(_TYPES[entry["dtype"]], tuple(entry["shape"]))
    if not 0 <= begin <= end <= len(data) or end - begin != kind.nbytes:
        raise ValueError(f"a tensor of {kind.nbytes} bytes would lie at {begin} to {end} of {len(data)}")
    piece = data[begin:end]
    return (piece if piece.data_ptr() % kind.dtype.itemsize == 0 else piece.clone()).view(kind.dtype).view(kind.size)
