"""Reads the tensors of a checkpoint (see tensor_storage.py): several files at once, each in one pass.

While a block of a file is hashed, the next ones are read. Wherever possible, a block is read straight into the tensor that it belongs to.
So when a digest turns out to differ, tensors have already changed.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sys
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import LoadPlanner, Metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from swarmtrain.config.user_files import check_regular_file, describe_os_error
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.file_digests import FileDigests, FileHasher, read_into
from swarmtrain.trainer.checkpoint.manifest import Manifest
from swarmtrain.trainer.checkpoint.storage.tensor_storage import DTYPES_BY_NAME, convert_errors

_BLOCK_BYTES = 1 << 20
"""A block lies within one piece of the file (see file_digests), and is hashed while it is in the cache of the core that has read it."""
_MAX_FILES_AT_ONCE = 8
_THREADS_PER_FILE = 4
_MAX_PENDING_BLOCKS = 2 * _THREADS_PER_FILE
_MADV_POPULATE_WRITE = 23
_MADVISE: Any = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None


@dataclass(frozen=True)
class FileVerification:
    """Files to verify while tensors are read, and the ranks that verify them."""

    digests: FileDigests
    groups: Sequence[Sequence[int]]
    """Groups of ranks that read the same copy of the files. Each group verifies all files."""


class DamagedFiles(CheckpointError):
    """Files of a checkpoint are missing or corrupt, or cannot be read."""


def load_tensors(
    tensors: dict[str, Any], path: Path, manifest: Manifest, verification: FileVerification | None = None, *, is_collective: bool = True
) -> None:
    """Load `tensors`, by name, from the checkpoint at `path`, in place.

    Collective, unless `is_collective` is False: all ranks must call it. `verification`: also verify files. Raises DamagedFiles if a file
    cannot be read or differs from its digest; the tensors may have changed then. Raises CheckpointError if the manifest is invalid.
    """
    reader = TensorStorageReader(path, manifest.tensors, verification.digests if verification else {})
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def plan_items() -> list[ReadItem]:
        planner.set_up_planner(tensors, reader.metadata, is_coordinator=False)
        items: list[ReadItem] = planner.create_local_plan().items
        return items

    try:
        if not is_collective:
            convert_errors(lambda: reader.read_items(plan_items(), planner, verification.digests if verification else ()))
            return
        items: list[ReadItem] = []
        # Plans are not exchanged: a rank's plan does not depend on those of the others, except for the files to verify.
        collectives.run_on_all_ranks(lambda: items.extend(convert_errors(plan_items)))
        verified_names: Collection[str] = ()
        if verification:
            names_by_rank = collectives.all_gather_values({*reader.list_files(items)})
            verified_names = assign_files_to_verify(verification, names_by_rank)[dist.get_rank()]
        collectives.run_on_all_ranks(lambda: convert_errors(lambda: reader.read_items(items, planner, verified_names)))
    except CheckpointError as error:
        rank_prefix = "" if error.rank is None else f"rank {error.rank}: "
        raise DamagedFiles(f"{rank_prefix}{error.message}", place=error.place or str(path)) from None


def assign_files_to_verify(verification: FileVerification, names_by_rank: Sequence[Collection[str]]) -> list[list[str]]:
    """Return the files that each rank verifies: each file is assigned to a rank of each group, which reads the file anyway if any does.

    `names_by_rank`: names of the files that each rank reads.
    """
    verified_names: list[list[str]] = [[] for _ in names_by_rank]
    for group in verification.groups:
        assigned_bytes = dict.fromkeys(group, 0)
        for name in sorted(verification.digests):
            rank = min(group, key=lambda rank: (name not in names_by_rank[rank], assigned_bytes[rank], rank))
            assigned_bytes[rank] += verification.digests[name]["size"]
            verified_names[rank].append(name)
    return verified_names


class TensorStorageReader:
    """Reads tensors from the shards of the checkpoint in `folder`. `tensor_index`: index built by a TensorStorageWriter."""

    def __init__(self, folder: Path, tensor_index: Mapping[str, Any], digests: FileDigests) -> None:
        """Parse `tensor_index`. Raises CheckpointError if it is invalid. `digests`: digests of the files that can be verified."""
        self.folder = folder
        self._digests = digests
        self._chunks: dict[MetadataIndex, _Chunk] = {}
        entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        try:
            for name, entry in tensor_index.items():
                dtype = DTYPES_BY_NAME[entry["dtype"]]
                chunks = [ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in entry["chunks"]]
                entries[name] = TensorStorageMetadata(TensorProperties(dtype), torch.Size(entry["size"]), chunks)
                for chunk, location in zip(chunks, entry["chunks"], strict=True):
                    file, offset = Path(location["file"]).name, int(location["offset"])
                    self._chunks[MetadataIndex(name, chunk.offsets)] = _Chunk(file, offset, dtype, chunk.sizes)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the tensor index in its manifest is invalid: {error!r}", place=str(folder)) from None
        self.metadata = Metadata(entries)

    def list_files(self, items: Sequence[ReadItem]) -> list[str]:
        """Return the names of the files that contain `items`, without duplicates."""
        return sorted({self._find_chunk(item).file for item in items})

    def read_items(self, items: Sequence[ReadItem], planner: LoadPlanner, verified_names: Collection[str]) -> None:
        """Read `items` into the tensors of `planner`, and verify the files `verified_names`.

        Raises CheckpointError if a file cannot be read or differs from its digest, in which case tensors may have changed.
        """
        targets = {item: planner.resolve_tensor(item).detach() for item in items}
        items_by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in items:
            items_by_file[self._find_chunk(item).file].append(item)
        names = sorted({*items_by_file, *verified_names})
        with ThreadPoolExecutor(min(len(names), _MAX_FILES_AT_ONCE) or 1) as pool:
            list(pool.map(lambda name: self._read_file(name, items_by_file[name], targets, verify=name in verified_names), names))
        for item, target in targets.items():
            planner.commit_tensor(item, target)

    def _find_chunk(self, item: ReadItem) -> _Chunk:
        return self._chunks[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]

    def _read_file(self, name: str, items: Sequence[ReadItem], targets: Mapping[ReadItem, Tensor], *, verify: bool) -> None:
        """Read `items` from the file `name` into their tensors in `targets`. `verify`: read the whole file, and compare its digest.

        Raises CheckpointError if the file cannot be read, is truncated, or differs from its digest.
        """
        expected = self._digests[name] if verify else None
        hasher = FileHasher(expected) if expected else None
        try:
            check_regular_file(self.folder / name)
            with (self.folder / name).open("rb", buffering=0) as file, _BlockReader(file, hasher) as reader:
                size = os.fstat(file.fileno()).st_size
                if expected and size != expected["size"]:
                    raise CheckpointError(f"{name} has {size} bytes instead of {expected['size']}", place=str(self.folder))
                for segment in self._plan_segments(items, targets, whole_chunks=verify):
                    memory = segment.allocate()
                    reader.advance_to(segment.start)
                    reader.start_read(memory)
                    if segment.direct_target is None:
                        reader.wait()
                    segment.copy_parts(memory)
                if expected:
                    reader.advance_to(size)
                reader.wait()
                if hasher and not hasher.matches():
                    raise CheckpointError(f"{name} is corrupt: its SHA-256 does not match", place=str(self.folder))
        except EOFError:
            raise CheckpointError(f"{name} is truncated", place=str(self.folder)) from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {describe_os_error(error)}", place=str(self.folder)) from None

    def _plan_segments(self, items: Sequence[ReadItem], targets: Mapping[ReadItem, Tensor], *, whole_chunks: bool) -> list[_Segment]:
        """Return the segments of a file that contain `items`, in the file's order. `whole_chunks`: do not divide chunks."""
        segments: dict[tuple[int, torch.Size], _Segment] = {}
        for item in items:
            chunk, starts, sizes = self._find_chunk(item), item.storage_offsets, item.lengths
            offset, chunk_sizes = chunk.offset, chunk.sizes
            if chunk_sizes and not whole_chunks:  # only the requested rows of a chunk are read
                offset += starts[0] * chunk_sizes[1:].numel() * chunk.dtype.itemsize
                starts, chunk_sizes = torch.Size([0, *starts[1:]]), torch.Size([sizes[0], *chunk_sizes[1:]])
            segment = segments.setdefault((offset, chunk_sizes), _Segment(offset, chunk_sizes, chunk.dtype, []))
            segment.parts.append(_Part(starts, sizes, targets[item]))
        return sorted(segments.values(), key=lambda segment: segment.start)


class _Chunk(NamedTuple):
    """A part of a tensor that is stored contiguously."""

    file: str
    offset: int
    dtype: torch.dtype
    sizes: torch.Size


class _Part(NamedTuple):
    """A part of a segment, and the tensor that it is read into."""

    starts: torch.Size
    sizes: torch.Size
    target: Tensor


@dataclass(frozen=True)
class _Segment:
    """Rows of a chunk, which are contiguous in the file."""

    start: int
    """Byte offset in the file."""
    sizes: torch.Size
    dtype: torch.dtype
    parts: list[_Part]

    def allocate(self) -> Tensor:
        """Return the memory to read this segment into, as bytes: that of its target, if there is one that has the same layout."""
        if (target := self.direct_target) is not None:
            return target.view(-1).view(torch.uint8)
        return torch.empty(self.sizes.numel() * self.dtype.itemsize, dtype=torch.uint8)

    def copy_parts(self, memory: Tensor) -> None:
        """Copy the parts from `memory`, which the segment was read into, to their targets."""
        if (target := self.direct_target) is not None:
            torch.autograd.graph.increment_version(target)  # as copy_() does: weights that are cast from it are then cast again
            return
        values = memory.view(self.dtype).view(self.sizes)
        for starts, sizes, target in self.parts:
            part = values
            for dimension, (start, length) in enumerate(zip(starts, sizes, strict=True)):
                part = part.narrow(dimension, start, length)
            target.copy_(part)

    @property
    def direct_target(self) -> Tensor | None:
        """The tensor that the segment is read straight into; None if it has another layout, or only a part of the segment."""
        if len(self.parts) == 1:
            _, sizes, target = self.parts[0]
            if sizes == self.sizes and target.is_contiguous() and target.dtype == self.dtype:
                return target
        return None


class _BlockReader:
    """Context manager that reads a file in blocks, several at the same time.

    The thread that has read a block also hashes it: at once, if the block begins a piece of the file, or else after the block before it.
    """

    def __init__(self, file: RawIOBase, hasher: FileHasher | None) -> None:
        self._descriptor, self._hasher, self._position = file.fileno(), hasher, 0
        self._pool = ThreadPoolExecutor(_THREADS_PER_FILE)
        self._pending: deque[ThreadFuture[None]] = deque()
        self._staging_blocks: deque[Tensor] = deque()

    def __enter__(self) -> _BlockReader:
        return self

    def __exit__(self, *args: object) -> None:
        self._pool.shutdown()

    def advance_to(self, offset: int) -> None:
        """Continue at byte `offset`. If the file is hashed, the bytes up to there are read; raises ValueError if they already were."""
        if self._hasher is None:
            self._position = offset
        elif offset < self._position:
            raise ValueError(f"tensors overlap at byte {offset} of the file")
        while self._position < offset:
            self._start_read_block(None, offset - self._position)

    def start_read(self, memory: Tensor) -> None:
        """Start to read the next bytes into `memory`, a tensor of bytes on any device."""
        end = self._position + memory.numel()
        while self._position < end:
            self._start_read_block(memory[self._position - end :], end - self._position)

    def wait(self) -> None:
        """Wait until the bytes are read and hashed. Raises EOFError if the file ends before, OSError if it cannot be read."""
        while self._pending:
            self._pending.popleft().result()

    def _start_read_block(self, target: Tensor | None, max_size: int) -> None:
        """Start to read the next block, of up to `max_size` bytes, to the beginning of `target`; None: only hash it.

        At most `_MAX_PENDING_BLOCKS` blocks are read ahead.
        """
        if len(self._pending) == _MAX_PENDING_BLOCKS:
            self._pending.popleft().result()
        size = min(max_size, _BLOCK_BYTES - self._position % _BLOCK_BYTES)
        target = None if target is None else target[:size]
        if target is not None and target.device.type == "cpu":
            block, target = target, None
        else:
            block = self._take_staging_block(size, pin=target is not None)
        piece = previous = None
        if self._hasher is not None:
            piece = self._hasher.find_piece(self._position)
            if self._position % self._hasher.piece_bytes and self._pending:
                previous = self._pending[-1]
        self._pending.append(self._pool.submit(self._read_block, block, self._position, target, piece, previous))
        self._position += size

    def _take_staging_block(self, size: int, *, pin: bool) -> Tensor:
        """Return one of the staging blocks in turn: by the time that one is used again, it is hashed."""
        if len(self._staging_blocks) < _MAX_PENDING_BLOCKS:
            self._staging_blocks.append(torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pin))
        self._staging_blocks.rotate()
        return self._staging_blocks[0][:size]

    def _read_block(
        self, block: Tensor, offset: int, target: Tensor | None, piece: hashlib._Hash | None, previous: ThreadFuture[None] | None
    ) -> None:
        """Read `block` from byte `offset`, copy it to `target`, if any, and hash it as part of `piece`, after the block of `previous`."""
        data = block.numpy().data
        if target is None:
            _map_pages(block)
        if read_into(data, self._descriptor, offset) < len(data):
            raise EOFError
        if target is not None:
            target.copy_(block)
        if piece is not None:
            if previous is not None:
                previous.result()
            piece.update(data)


def _map_pages(memory: Tensor) -> None:
    """Let the kernel map the pages of `memory`, which may never have been used, in one call instead of one page fault for each.

    Linux before 5.14 and other systems refuse the call, which changes nothing.
    """
    if _MADVISE is not None:
        start, end = memory.data_ptr() & -mmap.PAGESIZE, memory.data_ptr() + memory.numel()
        _MADVISE(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)
