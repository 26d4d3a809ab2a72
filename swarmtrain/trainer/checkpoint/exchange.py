"""Files that some nodes have and others lack go to these, from disk to disk, a block at a time. For the keepers' threads.

In turn k each node sends to the k-th after it and receives from the k-th before it, so that all links are busy both ways
and none has to carry the same bytes twice. A node that cannot read or write goes on to the end, so that nobody waits
for it, and says so then.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.config.files import reason
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint.nodes import Nodes

Files = Mapping[str, Mapping[str, Any]]
"""Name to size in bytes and SHA-256."""
LOG = logging.getLogger("swarmtrain")
_BLOCK = 1 << 22
_SILENT = 2.0
_SAY_EVERY = 10.0


def exchange(folder: Path, have: Files, nodes: Nodes, *, what: str | None = None) -> dict[str, dict[str, Any]]:
    """Return when `folder` holds on each node, on disk, the files that any has; and what these are. Called by all keepers together.

    `have`: what is in `folder` here. Of files of the same name that differ, the first node's goes to the others. With
    `what`, a name for all this, one that takes more than seconds is told of.
    Raises CheckpointError, on all alike.
    """
    offers = agreement.gather(have, nodes.keepers)
    wanted = {name: dict(facts) for offer in reversed(offers) for name, facts in offer.items()}
    source = {name: next(number for number, offer in enumerate(offers) if offer.get(name) == facts) for name, facts in wanted.items()}
    lacking = [[name for name in sorted(wanted) if offer.get(name) != wanted[name]] for offer in offers]
    arriving = _Arriving(folder, wanted, sum(wanted[name]["size"] for name in lacking[nodes.node]), what)
    leaving = _Leaving(folder, wanted)
    for turn in range(1, len(offers)):
        to, origin = (nodes.node + turn) % len(offers), (nodes.node - turn) % len(offers)
        sent = leaving.blocks([name for name in lacking[to] if source[name] == nodes.node])
        for block, room in zip_longest(sent, arriving.rooms([name for name in lacking[nodes.node] if source[name] == origin])):
            works = [] if block is None else [dist.isend(block, nodes.keeper(to), nodes.keepers)]
            works += [] if room is None else [dist.irecv(room, nodes.keeper(origin), nodes.keepers)]
            for work in works:
                if work is not None:
                    work.wait()
    agreement.by_every_rank(lambda: _raise(leaving.fault or arriving.fault, folder), nodes.keepers)
    return wanted


def _raise(fault: str | None, folder: Path) -> None:
    if fault:
        raise CheckpointError(fault, place=f"config trainer.save_dir {folder.parent}", hint="is the disk full, or gone?")


class _Leaving:
    """Reads files for others."""

    def __init__(self, folder: Path, wanted: Files) -> None:
        self._folder, self._wanted = folder, wanted
        self._room = torch.zeros(_BLOCK, dtype=torch.uint8)
        self.fault: str | None = None

    def blocks(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield the bytes of the files `names`. Of one that cannot be read comes something else, which its hash will show."""
        for name in names:
            for start in range(0, self._wanted[name]["size"], _BLOCK):
                yield self._block(name, start)

    def _block(self, name: str, start: int) -> Tensor:
        block = self._room[: min(_BLOCK, self._wanted[name]["size"] - start)]
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(start)
                file.readinto(block.numpy().data)
        except OSError as error:
            self.fault = f"{name}: {reason(error)}"
        return block


class _Arriving:
    """Writes what others send."""

    def __init__(self, folder: Path, wanted: Files, total: int, what: str | None) -> None:
        self._folder, self._wanted, self._total, self._what = folder, wanted, total, what
        self._room = torch.empty(_BLOCK, dtype=torch.uint8)
        self._done, self._begun = 0, time.monotonic()
        self._told = self._begun + _SILENT - _SAY_EVERY
        self.fault: str | None = None

    def rooms(self, names: Sequence[str]) -> Iterator[Tensor]:
        """Yield where to put the bytes of the files `names`; what has been put there is written when the next is asked for."""
        for name in names:
            yield from self._file(name)

    def _file(self, name: str) -> Iterator[Tensor]:
        size = self._wanted[name]["size"]
        digest, sizes = hashlib.sha256(), iter([min(_BLOCK, size - start) for start in range(0, size, _BLOCK)])
        try:
            with (self._folder / name).open("wb") as file:
                for size in sizes:
                    yield self._room[:size]
                    block = self._room.numpy()[:size].data
                    digest.update(block)
                    if self.fault is None:
                        file.write(block)
                    self._tell(size)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self.fault = self.fault or f"{name}: {reason(error)}"
            yield from (self._room[:size] for size in sizes)
            return
        if self.fault is None and digest.hexdigest() != self._wanted[name]["sha256"]:
            self.fault = f"{name} has come here damaged: its SHA-256 is another"

    def _tell(self, size: int) -> None:
        self._done += size
        if self._what and time.monotonic() - self._told > _SAY_EVERY:
            self._told = time.monotonic()
            LOG.warning("%s comes from another node: %.0f of %.0f MB", self._what, self._done / 1e6, self._total / 1e6)
