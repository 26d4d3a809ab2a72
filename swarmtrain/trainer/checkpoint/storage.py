"""Storage for torch's distributed checkpoint: raw tensor bytes in one file a rank, everything else as JSON.

torch's own file format keeps its metadata, and each tensor's frame, as pickles, which can run code when read. Here its
planners divide and reshard as usual, but what they write and read goes through this writer and reader: nothing is
pickled, nothing is unpickled, and entries that are not tensors are refused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, SavePlan, SavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from swarmtrain.errors import CheckpointError

_BLOCK = 1 << 24
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOATS, *_WHOLE)}
"""What a tensor of a checkpoint can be."""


class Memory:
    """Room in the host's memory for this rank's part of a checkpoint. It is kept: to have it made anew would cost more than to fill it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def fill(self, tensors: Sequence[Tensor]) -> memoryview:
        """Return the bytes of `tensors`, one after another, as they are now."""
        sources = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        size, offset = sum(source.numel() for source in sources), 0
        if size > self._bytes.numel():
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        for source in sources:
            self._bytes[offset : offset + source.numel()].copy_(source, non_blocking=True)
            offset += source.numel()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._bytes[:size].numpy().data


def part_name(number: int) -> str:
    """Return the name of the file with part `number`."""
    return f"part-{number:05}.bin"


class Writer(StorageWriter):
    """Writes part `number` into `folder`, in two steps: torch's save() copies it into `memory`, `write` writes it from there.

    After the first, `tensors` has on rank 0 the index of all parts.
    """

    def __init__(self, folder: Path, number: int, memory: Memory) -> None:
        self.folder = folder
        self.name = part_name(number)
        self.tensors: dict[str, Any] = {}
        self._memory = memory
        self._parts: dict[str, memoryview] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        staged = [(item.index, tensor_of(item, planner)) for item in plan.items]
        self._stage({self.name: [tensor for _, tensor in staged]})
        offset, results = 0, []
        for index, tensor in staged:
            results.append(WriteResult(index, tensor.nbytes, (self.name, offset)))
            offset += tensor.nbytes
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _stage(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Copy what each of `parts` has into memory."""
        room, start = self._memory.fill([tensor for tensors in parts.values() for tensor in tensors]), 0
        for name, tensors in parts.items():
            end = start + sum(tensor.nbytes for tensor in tensors)
            self._parts[name], start = room[start:end], end

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for part in results for result in part}
        self.tensors = {name: _describe(name, entry, places) for name, entry in metadata.state_dict_metadata.items()}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy this rank's part of `tensors` into memory, and return the part's index. Needs no other rank."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        plan = planner.create_local_plan()
        places = {result.index: result.storage_data for result in self.write_data(plan, planner).wait()}
        found = {}
        for item in plan.items:
            if item.tensor_data is None:
                raise CheckpointError("holds something that is no tensor")
            file, offset = places[item.index]
            chunk = item.tensor_data.chunk
            found[item.index.fqn] = {
                "dtype": str(item.tensor_data.properties.dtype).removeprefix("torch."),
                "size": list(item.tensor_data.size),
                "chunks": [{"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "offset": offset}],
            }
        return found

    def write(self) -> dict[str, dict[str, Any]]:
        """Write what is staged, and return each file's name with size and SHA-256; nothing if this rank has no part.

        Raises OSError, which names the part.
        """
        return {name: self._write(name, part) for name, part in self._parts.items() if part}

    def _write(self, name: str, part: memoryview) -> dict[str, Any]:
        path, digest = self.folder / name, hashlib.sha256()
        try:
            with path.open("xb") as file:
                for start in range(0, len(part), _BLOCK):
                    block = part[start : start + _BLOCK]
                    file.write(block)
                    digest.update(block)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            raise
        return {"size": len(part), "sha256": digest.hexdigest()}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads tensors from the parts in `folder`, found through `tensors`, the index that a Writer made."""

    def __init__(self, folder: Path, tensors: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the index makes no sense."""
        self.folder = folder
        self._places: dict[MetadataIndex, tuple[str, int, torch.dtype, torch.Size]] = {}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        try:
            for name, entry in tensors.items():
                dtype = DTYPES[entry["dtype"]]
                chunks = [ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in entry["chunks"]]
                entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["size"]), chunks)
                for chunk, place in zip(chunks, entry["chunks"], strict=True):
                    self._places[MetadataIndex(name, chunk.offsets)] = (Path(place["file"]).name, int(place["offset"]), dtype, chunk.sizes)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"its index makes no sense: {error!r}", place=str(folder)) from None
        self._metadata = Metadata(entries)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            self._read(item, target)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, target: Tensor) -> None:
        """Fill `target`: straight from the file if what it wants lies there in one piece, so that nothing is in memory twice."""
        name, offset, dtype, sizes = self._places[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]
        starts, lengths = item.storage_offsets, item.lengths
        if sizes:  # of a chunk's rows, only those that are wanted are read
            offset += starts[0] * sizes[1:].numel() * dtype.itemsize
            starts, sizes = torch.Size([0, *starts[1:]]), torch.Size([lengths[0], *sizes[1:]])
        at_once = sizes == lengths and target.is_contiguous() and target.device.type == "cpu" and target.dtype == dtype
        read = target if at_once else torch.empty(sizes, dtype=dtype)
        data = read.reshape(-1).view(torch.uint8).numpy().data
        with (self.folder / name).open("rb") as file:
            file.seek(offset)
            if file.readinto(data) != len(data):
                raise CheckpointError(f"{name} ends too early", place=str(self.folder))
        if not at_once:
            for dimension, (start, length) in enumerate(zip(starts, lengths, strict=True)):
                read = read.narrow(dimension, start, length)
            target.copy_(read)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def tensor_of(item: WriteItem, planner: SavePlanner) -> Tensor:
    """Return what is to be written for `item`. Raises CheckpointError if that is no tensor."""
    data = planner.resolve_data(item)
    if item.type is WriteItemType.BYTE_IO or not isinstance(data, Tensor):
        raise CheckpointError("holds something that is no tensor")
    return data


def _describe(name: str, entry: Any, places: Mapping[MetadataIndex, tuple[str, int]]) -> dict[str, Any]:
    chunks = []
    for chunk in entry.chunks:
        file, offset = places[MetadataIndex(name, chunk.offsets)]
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "offset": offset})
    return {"dtype": str(entry.properties.dtype).removeprefix("torch."), "size": list(entry.size), "chunks": chunks}
