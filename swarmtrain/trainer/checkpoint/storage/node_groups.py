"""Ranks grouped by node. The lowest rank of each node is its leader, which manages the checkpoints on the node's disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.storage.commit import run_and_convert_os_errors
from swarmtrain.trainer.runtime import Runtime

T = TypeVar("T")
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)


@dataclass(frozen=True)
class NodeGroups:
    """The nodes of one world, from the perspective of `rank`. Nodes are indexed in the order of their leaders' ranks."""

    rank: int
    node_of_rank: tuple[int, ...]
    """For each rank, the index of its node."""
    node_names: tuple[str, ...]
    """Name of each node, by node index."""
    leader_group: dist.ProcessGroup | None
    """Process group of all leaders, in node order; None on ranks that are not leaders. Only the leaders' background threads use it."""

    @classmethod
    def from_runtime(cls, runtime: Runtime) -> NodeGroups:
        """Gather the node of each rank from all ranks, and return the groups. Collective: all ranks must call it.

        Several nodes may run on one machine, so they are distinguished by the rank of their torchrun agent (GROUP_RANK).
        """
        locations = collectives.all_gather_values((os.environ.get("GROUP_RANK", "0"), runtime.node))
        unique_nodes = list(dict.fromkeys(locations))
        node_of_rank = tuple(unique_nodes.index(location) for location in locations)
        group = dist.new_group(
            [node_of_rank.index(number) for number in range(len(unique_nodes))], timeout=_COLLECTIVE_TIMEOUT, backend="gloo"
        )
        is_leader = node_of_rank.index(node_of_rank[runtime.rank]) == runtime.rank
        return cls(runtime.rank, node_of_rank, tuple(name for _, name in unique_nodes), group if is_leader else None)

    @property
    def node(self) -> int:
        """Index of this rank's node."""
        return self.node_of_rank[self.rank]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """Ranks on this rank's node."""
        return tuple(rank for rank, node in enumerate(self.node_of_rank) if node == self.node)

    def run_on_leaders(self, action: Callable[[], T], save_dir: Path) -> T:
        """Run `action` on every leader, and return this leader's result when all leaders have finished. Called by all leaders together.

        `save_dir` is named in errors. Raises CheckpointError on every leader if `action` fails on any leader.
        """
        return collectives.run_on_all_ranks(lambda: run_and_convert_os_errors(save_dir, action), self.leader_group)[self.node]

    def find_leader_rank(self, node: int) -> int:
        """Return the rank of the leader of the node with index `node`."""
        return self.node_of_rank.index(node)
