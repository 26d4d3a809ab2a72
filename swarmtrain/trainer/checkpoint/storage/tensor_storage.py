"""Storage for the planners of torch's distributed checkpoint (DCP): raw tensor bytes in one file per rank (its shard), the rest as JSON.

DCP's own storage and its save() and load() pickle metadata and plans, and unpickling can execute code. Here torch's planners shard and
reshard tensors as usual, but ranks exchange their plans as JSON, this module writes the files, and tensor_reader.py reads them: nothing is
pickled or unpickled, and entries that are not tensors are rejected.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from swarmtrain.errors import CheckpointError, SwarmtrainError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.file_digests import FileDigests, hash_memory
from swarmtrain.trainer.checkpoint.storage.node_groups import NodeGroups

LOG = logging.getLogger(__name__)
T = TypeVar("T")
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


def allocate_pinned_memory(size: int) -> Tensor:
    """Return `size` bytes of uninitialized pinned memory, as uint8. If CUDA cannot pin it, log a warning and return pageable memory.

    torch's allocator rounds pinned memory up to a power of two: 65 GB would need 128 GB (pytorch issue 171662). So, as torch's distributed
    checkpoint does, ordinary memory is registered with CUDA instead.
    """
    buffer = torch.empty(size, dtype=torch.uint8)
    if not size:
        return buffer
    address = buffer.data_ptr()
    error = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]  # not typed in torch
    if error:
        LOG.warning("cannot pin %s MiB of host memory (CUDA error %s): checkpoints are copied from the GPU more slowly", size >> 20, error)
    else:
        # Not at exit, when CUDA may be shut down already.
        weakref.finalize(buffer, _unpin_memory, address).atexit = False
    return buffer


def _unpin_memory(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]  # not typed in torch


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


def _format_shard_file_name(number: int) -> str:
    """Return the file name of the shard with the index `number`."""
    return f"part-{number:05}.bin"


class TensorStorageWriter:
    """Writes the shard with index `shard_number` of a checkpoint to `folder`, in two phases.

    `stage_shards` copies the shard into `staging_buffer`; then `write_staged_shards` writes it to disk. After the first phase,
    `tensor_index` is the index of the tensors in all shards: dtype, shape and chunks of each tensor, by name.
    """

    def __init__(self, folder: Path, shard_number: int, staging_buffer: StagingBuffer) -> None:
        self.folder = folder
        self.file_name = _format_shard_file_name(shard_number)
        self.tensor_index: dict[str, Any] = {}
        self._staging_buffer = staging_buffer
        self._staged_parts: dict[str, memoryview] = {}

    def stage_shards(self, tensors: Mapping[str, Any]) -> None:
        """Divide `tensors` among the ranks, and copy this rank's shard into the staging buffer.

        Collective: all ranks must call it, with their own tensors. Raises CheckpointError on all ranks if a value is not a tensor, or if
        any rank cannot copy its shard.
        """
        planner = _set_up_planner(tensors)
        encoded_plans = collectives.run_on_all_ranks(lambda: convert_errors(lambda: _encode_plan(planner.create_local_plan())))
        plans = [_decode_plan(encoded) for encoded in encoded_plans]
        divided_plans, _ = convert_errors(lambda: planner.create_global_plan(plans))  # each rank computes the same
        self.tensor_index = build_tensor_index({_format_shard_file_name(rank): plan for rank, plan in enumerate(divided_plans)})
        collectives.run_on_all_ranks(lambda: convert_errors(lambda: self._stage_planned_tensors(planner, plans)))

    def stage_local_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Copy this rank's shard of `tensors` into the staging buffer, without communication, and return the tensor index of this shard."""
        planner = _set_up_planner(tensors)
        plan = planner.create_local_plan()
        self.tensor_index = build_tensor_index({self.file_name: plan})
        self._stage_planned_tensors(planner, [plan])
        return self.tensor_index

    def _stage_planned_tensors(self, planner: DefaultSavePlanner, plans: Sequence[SavePlan]) -> None:  # NodeLocalWriter needs `plans`
        """Copy the tensors of this rank's shard into the staging buffer. `plans`: all tensors that each rank could write."""
        indices = _group_tensor_chunks_by_file(self.tensor_index).get(self.file_name, [])
        self._stage_files({self.file_name: [_find_tensor(planner, index) for index in indices]})

    def _stage_files(self, tensors_by_file: Mapping[str, Sequence[Tensor]]) -> None:
        """Copy the tensors of each file into the staging buffer. `tensors_by_file`: tensors of each shard, by file name."""
        staged, start = self._staging_buffer.stage_tensors([tensor for tensors in tensors_by_file.values() for tensor in tensors]), 0
        for name, tensors in tensors_by_file.items():
            end = start + sum(tensor.nbytes for tensor in tensors)
            self._staged_parts[name], start = staged[start:end], end

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


class NodeLocalWriter(TensorStorageWriter):
    """Writes the shards that are assigned to this rank, which may be none, or several, if each node has its own disk.

    To minimize network traffic, a node writes every shard that one of its ranks holds completely, even if it is the shard of another node's
    rank. The shards are the same as on a shared file system: one per rank. If ranks of several nodes hold the tensors of a shard (for
    example unsharded state, which all ranks hold), each of these nodes writes it.
    """

    def __init__(self, folder: Path, nodes: NodeGroups, staging_buffer: StagingBuffer) -> None:
        super().__init__(folder, nodes.rank, staging_buffer)
        self._nodes = nodes

    def _stage_planned_tensors(self, planner: DefaultSavePlanner, plans: Sequence[SavePlan]) -> None:
        files = _group_tensor_chunks_by_file(self.tensor_index)
        held_indices = [{item.index for item in plan.items} for plan in plans]
        writable = [[name for name, indices in files.items() if held.issuperset(indices)] for held in held_indices]
        assigned_names = assign_shards_to_ranks(writable, self._nodes.local_ranks)[self._nodes.rank]
        self._stage_files({name: [_find_tensor(planner, index) for index in files[name]] for name in assigned_names})


def assign_shards_to_ranks(writable_shards_by_rank: Sequence[Collection[str]], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Assign each shard that any of a node's `ranks` can write to one of these ranks. Return the assigned shard names by rank.

    `writable_shards_by_rank`: for each rank of the world, the names of the shards that it can write. Each rank is assigned its own shard;
    any other shard is assigned to the rank with the fewest shards.
    """
    assigned: dict[int, list[str]] = {rank: [] for rank in ranks}
    for name in sorted({name for rank in ranks for name in writable_shards_by_rank[rank]}):
        chosen = min(
            (rank for rank in ranks if name in writable_shards_by_rank[rank]),
            key=lambda rank: (name != _format_shard_file_name(rank), len(assigned[rank]), rank),
        )
        assigned[chosen].append(name)
    return assigned


def _group_tensor_chunks_by_file(tensor_index: Mapping[str, Any]) -> dict[str, list[MetadataIndex]]:
    """Return the tensor chunks in `tensor_index` by file name, in the order of their offsets in the file."""
    chunks_by_file: dict[str, list[tuple[int, MetadataIndex]]] = defaultdict(list)
    for name, entry in tensor_index.items():
        for chunk in entry["chunks"]:
            chunks_by_file[chunk["file"]].append((chunk["offset"], MetadataIndex(name, chunk["offsets"])))
    return {file: [index for _, index in sorted(chunks, key=lambda pair: pair[0])] for file, chunks in sorted(chunks_by_file.items())}


def build_tensor_index(plans: Mapping[str, SavePlan]) -> dict[str, Any]:
    """Return dtype, shape and chunks of the tensors in `plans`, by tensor name. `plans`: plan of each file, by file name."""
    tensor_index: dict[str, Any] = {}
    for file, plan in plans.items():
        offset = 0
        for item in plan.items:
            data = _get_tensor_data(item)
            dtype, chunk = data.properties.dtype, data.chunk
            entry = tensor_index.setdefault(item.index.fqn, {"dtype": _format_dtype(dtype), "size": list(data.size), "chunks": []})
            entry["chunks"].append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file, "offset": offset})
            offset += chunk.sizes.numel() * dtype.itemsize
    return tensor_index


def _find_tensor(planner: DefaultSavePlanner, index: MetadataIndex) -> Tensor:
    """Return the tensor chunk with `index` among the tensors of `planner`."""
    tensor: Tensor = planner.lookup_object(index)
    return tensor


def convert_errors(action: Callable[[], T]) -> T:
    """Run `action` and return its result. Raises CheckpointError if it fails, so that the failure can be raised on all ranks."""
    try:
        return action()
    except SwarmtrainError:
        raise
    except Exception as error:  # the device, the memory or torch may raise any error
        raise CheckpointError(str(error)) from error


def _set_up_planner(tensors: Mapping[str, Any]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    # Each rank plans as the coordinator, so that tensors that are not sharded are in the plan of every rank that holds them.
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    return planner


def _get_tensor_data(item: WriteItem) -> TensorWriteData:
    """Return shape and dtype of the tensor to write for `item`. Raises CheckpointError if it is not a tensor."""
    if item.type is WriteItemType.BYTE_IO or item.tensor_data is None:
        raise CheckpointError(f"{item.index.fqn} in the state to save is not a tensor")
    return item.tensor_data


def _encode_plan(plan: SavePlan) -> list[Any]:
    """Return `plan` as JSON. Raises CheckpointError if it contains a value that is not a tensor."""
    items = []
    for item in plan.items:
        data = _get_tensor_data(item)
        chunk = list(data.chunk.offsets), list(data.chunk.sizes)
        items.append([item.index.fqn, item.type.name, _format_dtype(data.properties.dtype), list(data.size), *chunk])
    return items


def _decode_plan(encoded: Sequence[Any]) -> SavePlan:
    """Return the plan that `_encode_plan` has encoded."""
    items = []
    for name, kind, dtype, size, offsets, sizes in encoded:
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        data = TensorWriteData(chunk, TensorProperties(DTYPES_BY_NAME[dtype]), torch.Size(size))
        items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType[kind], tensor_data=data))
    return SavePlan(items)


def _format_dtype(dtype: torch.dtype) -> str:
    """Return the name of `dtype`. Raises CheckpointError if checkpoints do not support it."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES_BY_NAME:
        raise CheckpointError(f"the state to save has a tensor of the type {name}; supported are {', '.join(DTYPES_BY_NAME)}")
    return name
