"""Checkpoint writer for nodes that each have their own disk.

To minimize network traffic, a node writes every shard that one of its ranks holds completely. The shards are the same as on a shared file
system: one per rank. If ranks of several nodes hold the tensors of a shard (for example unsharded state, which all ranks hold),
each of these nodes writes it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from swarmtrain.trainer.checkpoint.storage.node_groups import NodeGroups
from swarmtrain.trainer.checkpoint.storage.tensor_storage import (
    StagingBuffer,
    TensorStorageWriter,
    find_tensor,
    format_shard_file_name,
    group_tensor_chunks_by_file,
)


class NodeLocalWriter(TensorStorageWriter):
    """Writes the shards that are assigned to this rank, which may be none, or several.

    A node writes every shard that one of its ranks holds completely, even if it is the shard of another node's rank.
    """

    def __init__(self, folder: Path, nodes: NodeGroups, staging_buffer: StagingBuffer) -> None:
        super().__init__(folder, nodes.rank, staging_buffer)
        self._nodes = nodes

    def _stage_planned_tensors(self, planner: DefaultSavePlanner, plans: Sequence[SavePlan]) -> None:
        files = group_tensor_chunks_by_file(self.tensor_index)
        held_indices = [{item.index for item in plan.items} for plan in plans]
        writable = [[name for name, indices in files.items() if held.issuperset(indices)] for held in held_indices]
        assigned_names = assign_shards_to_ranks(writable, self._nodes.local_ranks)[self._nodes.rank]
        self._stage_files({name: [find_tensor(planner, index) for index in files[name]] for name in assigned_names})


def assign_shards_to_ranks(writable_shards_by_rank: Sequence[Collection[str]], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Assign each shard that any of a node's `ranks` can write to one of these ranks. Return the assigned shard names by rank.

    `writable_shards_by_rank`: for each rank of the world, the names of the shards that it can write. Each rank is assigned its own shard;
    any other shard is assigned to the rank with the fewest shards.
    """
    assigned: dict[int, list[str]] = {rank: [] for rank in ranks}
    for name in sorted({name for rank in ranks for name in writable_shards_by_rank[rank]}):
        chosen = min(
            (rank for rank in ranks if name in writable_shards_by_rank[rank]),
            key=lambda rank: (name != format_shard_file_name(rank), len(assigned[rank]), rank),
        )
        assigned[chosen].append(name)
    return assigned
