"""Storage for torch's distributed checkpoint (DCP): raw tensor bytes in one file per rank (its shard), everything else as JSON.

torch's own storage pickles the metadata, and unpickling can execute code. Here torch's planners shard and reshard tensors as usual, but
this module writes the files, and tensor_reader.py reads them: nothing is pickled or unpickled, and entries that are not tensors are
rejected.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import Metadata, SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from swarmtrain.errors import CheckpointError
from swarmtrain.trainer.checkpoint.file_digests import FileDigests, hash_memory
from swarmtrain.trainer.checkpoint.storage.pinned_memory import allocate_pinned_memory

_BLOCK_BYTES = 1 << 24
_FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in (*_FLOAT_DTYPES, *_INTEGER_DTYPES)}
"""Dtypes that the tensors of a checkpoint can have, by name."""


class StagingBuffer:
    """Host memory into which this rank's shard of a checkpoint is copied before it is written.

    The memory is reused for the next checkpoint, since allocating it takes longer than filling it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def stage_tensors(self, tensors: Sequence[Tensor]) -> memoryview:
        """Copy the bytes of `tensors` into the buffer, one after another, and return the filled region."""
        sources = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
        size, offset = sum(source.numel() for source in sources), 0
        if size > self._buffer.numel():
            self._buffer = torch.empty(0, dtype=torch.uint8)  # free the old memory first
            self._buffer = allocate_pinned_memory(size) if self._device.type == "cuda" else torch.empty(size, dtype=torch.uint8)
        with _use_copy_stream(self._device):
            for source in sources:
                self._buffer[offset : offset + source.numel()].copy_(source, non_blocking=True)
                offset += source.numel()
        return self._buffer[:size].numpy().data


@contextmanager
def _use_copy_stream(device: torch.device) -> Iterator[None]:
    """Context manager: copies in the body wait for the operations before them on `device`, and are complete at the end."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # not typed in torch
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()  # not the whole device: other streams may still have collectives that wait for a dead peer


def format_shard_file_name(number: int) -> str:
    """Return the file name of the shard with the index `number`."""
    return f"part-{number:05}.bin"


class TensorStorageWriter(StorageWriter):
    """Writes the shard with index `shard_number` of a checkpoint to `folder`, in two phases.

    save() of torch.distributed.checkpoint (DCP) copies the shard into `staging_buffer`; then `write_staged_shards` writes it to disk. After
    the first phase, `tensor_index` on rank 0 is the index of the tensors in all shards.
    """

    def __init__(self, folder: Path, shard_number: int, staging_buffer: StagingBuffer) -> None:
        self.folder = folder
        self.file_name = format_shard_file_name(shard_number)
        self.tensor_index: dict[str, Any] = {}
        self._staging_buffer = staging_buffer
        self._staged_parts: dict[str, memoryview] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        staged = [(item.index, resolve_item_tensor(item, planner)) for item in plan.items]
        self._stage_shards({self.file_name: [tensor for _, tensor in staged]})
        offset, results = 0, []
        for index, tensor in staged:
            results.append(WriteResult(index, tensor.nbytes, (self.file_name, offset)))
            offset += tensor.nbytes
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _stage_shards(self, tensors_by_file: Mapping[str, Sequence[Tensor]]) -> None:
        """Copy the tensors of each shard into the staging buffer. `tensors_by_file`: tensors of each shard, by file name."""
        staged, start = self._staging_buffer.stage_tensors([tensor for tensors in tensors_by_file.values() for tensor in tensors]), 0
        for name, tensors in tensors_by_file.items():
            end = start + sum(tensor.nbytes for tensor in tensors)
            self._staged_parts[name], start = staged[start:end], end

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        locations = {result.index: result.storage_data for rank_results in results for result in rank_results}
        self.tensor_index = {name: _build_index_entry(name, entry, locations) for name, entry in metadata.state_dict_metadata.items()}

    def stage_local_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy this rank's shard of `tensors` into the staging buffer, without communication.

        Return the tensor index of this shard: dtype, shape and chunks of each tensor, by name.
        """
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=True)
        plan = planner.create_local_plan()
        locations = {result.index: result.storage_data for result in self.write_data(plan, planner).wait()}
        index = {}
        for item in plan.items:
            if item.tensor_data is None:
                raise CheckpointError("the state to save contains a value that is not a tensor")
            file, offset = locations[item.index]
            chunk = item.tensor_data.chunk
            index[item.index.fqn] = {
                "dtype": str(item.tensor_data.properties.dtype).removeprefix("torch."),
                "size": list(item.tensor_data.size),
                "chunks": [{"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "offset": offset}],
            }
        return index

    def write_staged_shards(self) -> FileDigests:
        """Write the staged shards to the folder, and return size and digest of each file by name; empty if this rank has no shard.

        Raises OSError with the path of the file that cannot be written.
        """
        return {name: self._write_shard_file(name, part) for name, part in self._staged_parts.items() if part}

    def _write_shard_file(self, name: str, data: memoryview) -> dict[str, Any]:
        path = self.folder / name
        try:
            with ThreadPoolExecutor(1) as pool, path.open("xb") as file:
                hasher = pool.submit(hash_memory, data)
                for start in range(0, len(data), _BLOCK_BYTES):
                    file.write(data[start : start + _BLOCK_BYTES])
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = str(path)
            raise
        return hasher.result().build_entry(len(data))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def resolve_item_tensor(write_item: WriteItem, planner: SavePlanner) -> Tensor:
    """Return the tensor to write for `write_item`. Raises CheckpointError if `write_item` is not a tensor."""
    data = planner.resolve_data(write_item)
    if write_item.type is WriteItemType.BYTE_IO or not isinstance(data, Tensor):
        raise CheckpointError("the state to save contains a value that is not a tensor")
    return data


def describe_first_failure(error: CheckpointException) -> str:
    """Return rank and message of the first failure in `error`, the exception of a failed torch DCP operation."""
    rank, (message, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {message}"


def _build_index_entry(tensor_name: str, tensor_metadata: Any, locations: Mapping[MetadataIndex, tuple[str, int]]) -> dict[str, Any]:
    chunks = []
    for chunk in tensor_metadata.chunks:
        file, offset = locations[MetadataIndex(tensor_name, chunk.offsets)]
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "offset": offset})
    return {"dtype": str(tensor_metadata.properties.dtype).removeprefix("torch."), "size": list(tensor_metadata.size), "chunks": chunks}
