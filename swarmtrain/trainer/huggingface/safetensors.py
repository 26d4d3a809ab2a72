"""Reader and writer of the safetensors format: a JSON header with dtype, shape and offsets of each tensor, then the tensors' bytes.

Files are written one tensor at a time, and read as memory-mapped views, so that unused data is never loaded.
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

from swarmtrain.config.user_files import open_regular_file
from swarmtrain.errors import CheckpointError

_FLOAT_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_INTEGER_DTYPES = {"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_DTYPES = {**{name: dtype for dtype, name in _FLOAT_DTYPE_NAMES.items()}, **_INTEGER_DTYPES}
_LENGTH_BYTES = 8
"""Size in bytes of the header's length field. The header is padded to a multiple of this size."""
_MAX_HEADER_BYTES = 100_000_000
_FINGERPRINT_BYTES = 1 << 20


def parse_dtype(name: str | None) -> torch.dtype | None:
    """Return the float dtype with this `name`, such as "bfloat16"; None if there is no such dtype."""
    return next((candidate for candidate in _FLOAT_DTYPE_NAMES if str(candidate) == f"torch.{name}"), None)


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.size) * self.dtype.itemsize


def write_tensors(path: Path, specs: Mapping[str, TensorSpec], load_tensor: Callable[[str], Tensor]) -> None:
    """Write a safetensors file with the tensors `specs`. `load_tensor` is called with a tensor's name when that tensor is written.

    Raises OSError if the file cannot be written.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.nbytes
        header[name] = {"dtype": _FLOAT_DTYPE_NAMES[spec.dtype], "shape": list(spec.size), "data_offsets": [begin, end]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % _LENGTH_BYTES)
    with path.open("xb") as file:
        file.write(len(header_bytes).to_bytes(_LENGTH_BYTES, "little") + header_bytes)
        for name, spec in specs.items():
            values = load_tensor(name).to(spec.dtype).contiguous().reshape(-1).view(torch.uint8)
            file.write(values.numpy().data)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, as memory-mapped views.

    Raises CheckpointError if the file is incomplete or invalid.
    """
    try:
        size = path.stat().st_size
        with open_regular_file(path) as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header_bytes = file.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
        header = json.loads(header_bytes)
        data = torch.from_numpy(np.memmap(path, np.uint8, "c"))[_LENGTH_BYTES + length :]
        return {name: _view_tensor(data, entry) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", place=str(path), hint=f"ls -l {path} shows what it is") from None
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"is not a complete safetensors file: {error}", place=str(path), hint="download it again, or save it with another dtype"
        ) from None


def read_fingerprint_bytes(path: Path) -> bytes:
    """Return bytes that identify a safetensors file: its size, header and last bytes. Raises CheckpointError if it cannot be read."""
    try:
        with open_regular_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _FINGERPRINT_BYTES))
            tail = file.read()
            file.seek(0)
            return b"%d " % size + file.read(min(int.from_bytes(file.read(_LENGTH_BYTES), "little"), _MAX_HEADER_BYTES)) + tail
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", place=str(path), hint=f"ls -l {path} shows what it is") from None


def _view_tensor(byte_buffer: Tensor, header_entry: Mapping[str, Any]) -> Tensor:
    begin, end = header_entry["data_offsets"]
    if header_entry["dtype"] not in _DTYPES:
        raise ValueError(f"unsupported dtype {header_entry['dtype']}; supported: {', '.join(_DTYPES)}")
    spec = TensorSpec(_DTYPES[header_entry["dtype"]], tuple(header_entry["shape"]))
    if not 0 <= begin <= end <= len(byte_buffer) or end - begin != spec.nbytes:
        raise ValueError(
            f"the data offsets {begin} to {end} do not match a tensor of {spec.nbytes} bytes in {len(byte_buffer)} bytes of data"
        )
    piece = byte_buffer[begin:end]
    return (piece if piece.data_ptr() % spec.dtype.itemsize == 0 else piece.clone()).view(spec.dtype).view(spec.size)
