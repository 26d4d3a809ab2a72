"""Where checkpoints are kept: in one folder that all nodes see, or in one of each node's own.

                    Shared                              Own
who acts            rank 0                              one rank of each node, its keeper
a part              is written once                     is written by each node that holds it, and sent to the others
stands              by rank 0's rename                  by each keeper's, when all have everything
the fence           one token in the folder             the same token in each folder
the newest          in the folder                       that is whole anywhere, or of what all have together; it is sent to the others
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from swarmtrain.board import Board
from swarmtrain.errors import CheckpointError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint import fence, stage
from swarmtrain.trainer.checkpoint.apart import NodeWriter
from swarmtrain.trainer.checkpoint.background import Files, collect_notes
from swarmtrain.trainer.checkpoint.exchange import exchange
from swarmtrain.trainer.checkpoint.nodes import Nodes
from swarmtrain.trainer.checkpoint.search import Folders, Found, in_one_folder
from swarmtrain.trainer.checkpoint.storage import Memory, Writer
from swarmtrain.trainer.runtime import Runtime

Note = Callable[[str], None]
_TRIES = 3


class Disk(Protocol):
    """All methods but `commit` are called by all ranks together."""

    keeps: bool
    """This rank acts for the disk, or for its node's."""

    @property
    def nodes(self) -> Nodes | None:
        """The nodes, where each has its own disk."""
        ...

    def claim(self) -> int:
        """Take a token for this world, and return it.

        Raises CheckpointError if the folder cannot be written, or is not what the config says; BoardError.
        """
        ...

    def begin(self, step: int, token: int) -> Path:
        """Make and return an empty folder for the checkpoint of `step`. Raises WorldError, CheckpointError."""
        ...

    def writer(self, folder: Path, memory: Memory) -> Writer:
        """Return what writes this rank's share of a checkpoint."""
        ...

    def divide(self, writer: Writer) -> None:
        """Let `writer` know what its share is, after torch's save()."""
        ...

    def commit(self, folder: Path, all_left: threading.Event, act: Callable[[Files], Path]) -> Path:
        """Return what `act` does when `folder` holds all parts, which it is told. Called where a rank keeps, in a thread.

        `all_left`: all ranks have written theirs. Raises CheckpointError, WorldError.
        """
        ...

    def newest(self, token: int) -> Found | None:
        """Return the newest checkpoint that is whole, for the world `token`; None if there is none. Raises CheckpointError."""
        ...


class Shared:
    """A folder that all nodes see."""

    def __init__(self, here: Runtime, save_dir: Path, note: Note) -> None:
        self._here, self._save_dir, self._note = here, save_dir, note
        self.keeps = here.first
        self.nodes = None

    def claim(self) -> int:
        token = agreement.by_first_rank(lambda: fence.claim(self._save_dir, _highest(self._save_dir)))
        fence.find(self._save_dir, token)
        return token

    def begin(self, step: int, token: int) -> Path:
        return agreement.by_first_rank(lambda: stage.told(self._save_dir, lambda: stage.begin(self._save_dir, step, token)))

    def writer(self, folder: Path, memory: Memory) -> Writer:
        return Writer(folder, self._here.rank, memory)

    def divide(self, writer: Writer) -> None: ...

    def commit(self, folder: Path, all_left: threading.Event, act: Callable[[Files], Path]) -> Path:
        return stage.told(self._save_dir, lambda: act(collect_notes(folder, range(self._here.size), all_left)))

    def newest(self, token: int) -> Found | None:
        return in_one_folder(self._here, self._save_dir, self._note)


class Own:
    """A folder of each node's own."""

    def __init__(self, here: Runtime, save_dir: Path, note: Note) -> None:
        self._here, self._save_dir, self._note = here, save_dir, note
        self.nodes = Nodes.meet(here)
        self.keeps = self.nodes.keepers is not None

    def claim(self) -> int:
        for _ in range(_TRIES):
            if token := self._claim():
                return token
        raise CheckpointError(
            f"is one folder for several of the nodes {', '.join(self.nodes.names)}",
            place=f"config trainer.save_dir {self._save_dir}",
            hint="trainer.save_dir_shared: true; or give each node a folder of its own",
        )

    def _claim(self) -> int | None:
        """Return the token that is taken on all disks, None if on some another world or node was quicker."""
        highest = max(agreement.by_every_rank(lambda: _highest(self._save_dir) if self.keeps else 0))
        token = agreement.by_first_rank(lambda: self._drawn(highest))
        return token if all(agreement.by_every_rank(lambda: not self.keeps or fence.take(self._save_dir, token))) else None

    def begin(self, step: int, token: int) -> Path:
        agreement.by_every_rank(lambda: self.keeps and stage.told(self._save_dir, lambda: stage.begin(self._save_dir, step, token)))
        return stage.aside(self._save_dir, step, token)

    def writer(self, folder: Path, memory: Memory) -> Writer:
        return NodeWriter(folder, self.nodes, memory)

    def divide(self, writer: Writer) -> None:
        if isinstance(writer, NodeWriter):
            writer.share()

    def commit(self, folder: Path, all_left: threading.Event, act: Callable[[Files], Path]) -> Path:
        have = self.nodes.together(lambda: collect_notes(folder, self.nodes.mates, all_left), self._save_dir)
        files = exchange(folder, have, self.nodes)
        return self.nodes.together(lambda: act(files), self._save_dir)

    def newest(self, token: int) -> Found | None:
        return Folders(self.nodes, self._save_dir, token, self._note).newest()

    def _drawn(self, highest: int) -> int:
        """Return a token above `highest` that no other world of this run has had, as far as the board knows: its nodes may be others."""
        return Board(self._here.board).token(highest) if self._here.board else highest + 1


def disk(here: Runtime, save_dir: Path, note: Note) -> Disk:
    """Return the disk that the config says. Called by all ranks together."""
    return Shared(here, save_dir, note) if here.config.trainer.save_dir_shared else Own(here, save_dir, note)


def _highest(save_dir: Path) -> int:
    """Return the highest token of what stands in `save_dir` and of its fence, 0 if there is none."""
    return max(fence.highest(save_dir), *(content.token for _, content in stage.newest_first(save_dir)), 0)
