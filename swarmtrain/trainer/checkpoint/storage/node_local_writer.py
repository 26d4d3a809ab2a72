"""Checkpoint writer for nodes that each have their own disk.

To minimize network traffic, a node writes every shard that one of its ranks holds completely. The shards are the same as on a shared file
system: one per rank. If ranks of several nodes hold the tensors of a shard (for example unsharded state, which all ranks hold),
each of these nodes writes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from swarmtrain.trainer import collectives
from swarmtrain.trainer.checkpoint.storage.node_groups import NodeGroups
from swarmtrain.trainer.checkpoint.storage.tensor_storage import (
    StagingBuffer,
    TensorStorageWriter,
    format_shard_file_name,
    resolve_item_tensor,
)


class NodeLocalWriter(TensorStorageWriter):
    """Writes the shards that are assigned to this rank.

    A node writes every shard that one of its ranks holds completely, even if it is the shard of another node's rank. After save()
    of torch.distributed.checkpoint (DCP), `stage_assigned_shards` assigns the node's shards to its ranks, and copies this rank's shards
    into the staging buffer.
    """

    def __init__(self, folder: Path, nodes: NodeGroups, staging_buffer: StagingBuffer) -> None:
        super().__init__(folder, nodes.rank, staging_buffer)
        self._nodes = nodes
        self._planned_items: list[WriteItem] = []
        self._tensors_by_index: dict[MetadataIndex, Tensor] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._planned_items = plan.items  # before torch divides replicated items among ranks
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._tensors_by_index = {item.index: resolve_item_tensor(item, planner) for item in self._planned_items}
        return super().write_data(plan, planner)

    def _stage_shards(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """A no-op: `stage_assigned_shards` stages this rank's shards instead, since there may be more than one."""

    def stage_assigned_shards(self) -> None:
        """Assign the shards of each node to its ranks, and copy this rank's shards into the staging buffer.

        Called by all ranks together, after save() of torch.distributed.checkpoint (DCP).
        """
        self.tensor_index = collectives.run_on_rank_zero(lambda: self.tensor_index)
        parts = group_tensor_chunks_by_file(self.tensor_index)
        writable = collectives.all_gather_objects(
            [name for name, indices in parts.items() if all(index in self._tensors_by_index for index in indices)]
        )
        assigned_names = assign_shards_to_ranks(writable, self._nodes.local_ranks)[self._nodes.rank]
        super()._stage_shards({name: [self._tensors_by_index[index] for index in parts[name]] for name in assigned_names})
        self._tensors_by_index = {}


def group_tensor_chunks_by_file(tensor_index: Mapping[str, Any]) -> dict[str, list[MetadataIndex]]:
    """Return the tensor chunks in `tensor_index` by file name, in the order of their offsets in the file."""
    chunks_by_file: dict[str, list[tuple[int, MetadataIndex]]] = defaultdict(list)
    for name, entry in tensor_index.items():
        for chunk in entry["chunks"]:
            chunks_by_file[chunk["file"]].append((chunk["offset"], MetadataIndex(name, chunk["offsets"])))
    return {file: [index for _, index in sorted(chunks, key=lambda pair: pair[0])] for file, chunks in sorted(chunks_by_file.items())}


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
