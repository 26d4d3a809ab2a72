"""Copy files in blocks between the disks of nodes, until all nodes have all files. Used by background threads of the nodes' leaders.

In round k each node sends to the k-th node after it and receives from the k-th node before it, so that all links are busy in both
directions and no link carries the same bytes twice. A node that fails to read or write still takes part in all rounds, so that no other
node waits for it. It raises its error afterwards.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.file_digests import FileDigests, FileHasher
from swarmtrain.trainer.checkpoint.storage.node_groups import NodeGroups

LOG = logging.getLogger("swarmtrain")
_BLOCK_BYTES = 1 << 22
_LOG_AFTER_SECONDS = 2.0
_LOG_INTERVAL_SECONDS = 10.0


def exchange_files(folder: Path, local_file_digests: FileDigests, nodes: NodeGroups, *, label: str | None = None) -> FileDigests:
    """Copy files between the nodes until `folder` on each node has all files that any node has. Return the digests of all files.

    Called by all leaders together. `local_file_digests`: digests of the files in `folder` on this node. If files with the same name differ,
    the copy of the first node is sent to the others. `label`: name of the transfer in progress messages, which are logged if it takes long.
    Raises CheckpointError on every leader if the transfer fails on any leader.
    """
    offers = collectives.all_gather_values(local_file_digests, nodes.leader_group)
    all_files = {name: dict(digest) for offer in reversed(offers) for name, digest in offer.items()}
    source_of = {
        name: next(number for number, offer in enumerate(offers) if offer.get(name) == digest) for name, digest in all_files.items()
    }
    missing = [[name for name in sorted(all_files) if offer.get(name) != all_files[name]] for offer in offers]
    receiver = _FileReceiver(folder, all_files, sum(all_files[name]["size"] for name in missing[nodes.node]), label)
    sender = _FileSender(folder, all_files)
    for turn in range(1, len(offers)):
        destination, origin = (nodes.node + turn) % len(offers), (nodes.node - turn) % len(offers)
        outgoing = sender.iterate_blocks([name for name in missing[destination] if source_of[name] == nodes.node])
        for block, receive_buffer in zip_longest(
            outgoing, receiver.iterate_receive_buffers([name for name in missing[nodes.node] if source_of[name] == origin])
        ):
            works = [] if block is None else [dist.isend(block, nodes.find_leader_rank(destination), nodes.leader_group)]
            works += [] if receive_buffer is None else [dist.irecv(receive_buffer, nodes.find_leader_rank(origin), nodes.leader_group)]
            for work in works:
                if work is not None:
                    work.wait()
    collectives.run_on_all_ranks(lambda: _raise_if_transfer_failed(sender.fault or receiver.fault, folder), nodes.leader_group)
    return all_files


def _raise_if_transfer_failed(fault: str | None, folder: Path) -> None:
    if fault:
        raise CheckpointError(fault, place=f"config trainer.save_dir {folder.parent}", hint="check that the disk is mounted and not full")


class _FileSender:
    """Reads files and splits them into blocks, which are sent to other nodes."""

    def __init__(self, folder: Path, files: FileDigests) -> None:
        self._folder, self._files = folder, files
        self._buffer = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8)
        self.fault: str | None = None

    def iterate_blocks(self, file_names: Sequence[str]) -> Iterator[Tensor]:
        """Yield the bytes of the files `file_names` in blocks.

        If a file cannot be read, blocks with arbitrary bytes are sent in its place; the receiver detects this by the file's SHA-256.
        """
        for name in file_names:
            for start in range(0, self._files[name]["size"], _BLOCK_BYTES):
                yield self._read_block(name, start)

    def _read_block(self, file_name: str, start: int) -> Tensor:
        block = self._buffer[: min(_BLOCK_BYTES, self._files[file_name]["size"] - start)]
        try:
            with (self._folder / file_name).open("rb") as file:
                file.seek(start)
                file.readinto(block.numpy().data)
        except OSError as error:
            self.fault = f"{file_name}: {describe_os_error(error)}"
        return block


class _FileReceiver:
    """Writes the files that other nodes send, and verifies their SHA-256."""

    def __init__(self, folder: Path, files: FileDigests, total_bytes: int, label: str | None) -> None:
        self._folder, self._files, self._total_bytes, self._label = folder, files, total_bytes, label
        self._buffer = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
        self._received_bytes, self._start_time = 0, time.monotonic()
        self._last_logged = self._start_time + _LOG_AFTER_SECONDS - _LOG_INTERVAL_SECONDS
        self.fault: str | None = None

    def iterate_receive_buffers(self, file_names: Sequence[str]) -> Iterator[Tensor]:
        """Yield a buffer for each block of the files `file_names`.

        The caller fills the buffer with the received block. The block is written to disk when the next buffer is requested.
        """
        for name in file_names:
            yield from self._receive_file(name)

    def _receive_file(self, name: str) -> Iterator[Tensor]:
        size = self._files[name]["size"]
        hasher, sizes = FileHasher(self._files[name]), iter([min(_BLOCK_BYTES, size - start) for start in range(0, size, _BLOCK_BYTES)])
        try:
            with (self._folder / name).open("wb") as file:
                for size in sizes:
                    yield self._buffer[:size]
                    block = self._buffer.numpy()[:size].data
                    hasher.update(block)
                    if self.fault is None:
                        file.write(block)
                    self._log_progress(size)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.fault = self.fault or f"{name}: {describe_os_error(error)}"
            yield from (self._buffer[:size] for size in sizes)
            return
        if self.fault is None and not hasher.matches():
            self.fault = f"{name} was corrupted in transfer: its SHA-256 does not match"

    def _log_progress(self, block_size: int) -> None:
        self._received_bytes += block_size
        if self._label and time.monotonic() - self._last_logged > _LOG_INTERVAL_SECONDS:
            self._last_logged = time.monotonic()
            LOG.warning("copying %s from another node: %.0f of %.0f MB", self._label, self._received_bytes / 1e6, self._total_bytes / 1e6)
