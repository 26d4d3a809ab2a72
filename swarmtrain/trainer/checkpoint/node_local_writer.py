"""What each node writes of a checkpoint if each has its own disk: everything that its ranks hold, to minimize network traffic.

Parts are the same as on a shared disk, one per rank. If ranks of several nodes hold the content of a part, as all ranks do with
unsharded state, each of these nodes writes it.
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
from swarmtrain.trainer.checkpoint.node_groups import NodeGroups
from swarmtrain.trainer.checkpoint.tensor_storage import StagingBuffer, TensorStorageWriter, format_part_name, resolve_item_tensor


class NodeLocalWriter(TensorStorageWriter):
    """Writes the parts of its node that are assigned to its rank: a node writes each part that one of its ranks holds completely, even if
    it is another node's. After torch's save(), `stage_assigned_parts` assigns the parts and copies them into memory.
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

    def _stage_parts(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """A no-op: this rank's own part may not be all that it has to write. See `stage_assigned_parts`."""

    def stage_assigned_parts(self) -> None:
        """Agree which rank of a node writes which parts, and copy this rank's. Called by all ranks together, after torch's save()."""
        self.tensor_index = collectives.run_on_rank_zero(lambda: self.tensor_index)
        parts = group_index_by_file(self.tensor_index)
        writable = collectives.all_gather_objects(
            [name for name, indices in parts.items() if all(index in self._tensors_by_index for index in indices)]
        )
        assigned_names = assign_parts_to_ranks(writable, self._nodes.local_ranks)[self._nodes.rank]
        super()._stage_parts({name: [self._tensors_by_index[index] for index in parts[name]] for name in assigned_names})
        self._tensors_by_index = {}


def group_index_by_file(tensor_index: Mapping[str, Any]) -> dict[str, list[MetadataIndex]]:
    """Return the entries of `tensor_index` by file, in their order in the file."""
    chunks_by_file: dict[str, list[tuple[int, MetadataIndex]]] = defaultdict(list)
    for name, entry in tensor_index.items():
        for chunk in entry["chunks"]:
            chunks_by_file[chunk["file"]].append((chunk["offset"], MetadataIndex(name, chunk["offsets"])))
    return {file: [index for _, index in sorted(chunks, key=lambda pair: pair[0])] for file, chunks in sorted(chunks_by_file.items())}


def assign_parts_to_ranks(writable: Sequence[Collection[str]], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Assign each part that `ranks` of a node can write (`writable`, by rank) to one rank: its own, else the one with the fewest."""
    assigned: dict[int, list[str]] = {rank: [] for rank in ranks}
    for name in sorted({name for rank in ranks for name in writable[rank]}):
        chosen = min(
            (rank for rank in ranks if name in writable[rank]), key=lambda rank: (name != format_part_name(rank), len(assigned[rank]), rank)
        )
        assigned[chosen].append(name)
    return assigned
