"""Which ranks are on the same node. One of each node's, its lowest, keeps the node's own disk for it: the node's keeper."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint.stage import told
from swarmtrain.trainer.runtime import Runtime

T = TypeVar("T")
_PATIENCE = timedelta(minutes=30)


@dataclass(frozen=True)
class Nodes:
    """The nodes of one world, as one of its ranks sees them. They are numbered by their keepers' ranks."""

    rank: int
    of: tuple[int, ...]
    """Node of each rank."""
    names: tuple[str, ...]
    """Of each node, as the run has named it."""
    keepers: dist.ProcessGroup | None
    """All keepers, in the order of their nodes, for their threads alone: training has the other groups. None on other ranks."""

    @classmethod
    def meet(cls, here: Runtime) -> Nodes:
        """Find out who is where. Called by all ranks together.

        Several nodes may live on one machine, so it is torchrun's number of the agent that tells them apart.
        """
        places = agreement.gather((os.environ.get("GROUP_RANK", "0"), here.node))
        distinct = list(dict.fromkeys(places))
        of = tuple(distinct.index(place) for place in places)
        group = dist.new_group([of.index(number) for number in range(len(distinct))], timeout=_PATIENCE, backend="gloo")
        keeps = of.index(of[here.rank]) == here.rank
        return cls(here.rank, of, tuple(name for _, name in distinct), group if keeps else None)

    @property
    def node(self) -> int:
        """This rank's."""
        return self.of[self.rank]

    @property
    def mates(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return tuple(rank for rank, node in enumerate(self.of) if node == self.node)

    def together(self, act: Callable[[], T], save_dir: Path) -> T:
        """Return what `act` does here when every keeper has done it. Called by keepers. Raises CheckpointError, on all alike."""
        return agreement.by_every_rank(lambda: told(save_dir, act), self.keepers)[self.node]

    def keeper(self, node: int) -> int:
        """Return the rank that keeps the disk of `node`."""
        return self.of.index(node)
