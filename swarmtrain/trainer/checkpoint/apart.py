"""What each node writes of a checkpoint where each has its own disk: all that its ranks hold, so that least goes over the network.

Parts are the same as on a shared disk, one a rank. Where ranks of several nodes hold what a part has, as all do whose state
is whole, each of these nodes writes it.
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

from swarmtrain.trainer import agreement
from swarmtrain.trainer.checkpoint.nodes import Nodes
from swarmtrain.trainer.checkpoint.storage import Memory, Writer, part_name, tensor_of


class NodeWriter(Writer):
    """Writes all parts that its node is to write: each that some rank of the node has the whole of, be it also another node's.

    After torch's save() `share` says which, and copies these.
    """

    def __init__(self, folder: Path, nodes: Nodes, memory: Memory) -> None:
        super().__init__(folder, nodes.rank, memory)
        self._nodes = nodes
        self._mine: list[WriteItem] = []
        self._held: dict[MetadataIndex, Tensor] = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._mine = plan.items  # before it is divided among those that have the same
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self._held = {item.index: tensor_of(item, planner) for item in self._mine}
        return super().write_data(plan, planner)

    def _stage(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Its own part is not all that it may have to write."""

    def share(self) -> None:
        """Agree on who of a node writes what, and copy this rank's. Called by all ranks together, after torch's save()."""
        self.tensors = agreement.by_first_rank(lambda: self.tensors)
        parts = contents(self.tensors)
        able = agreement.gather([name for name, inside in parts.items() if all(index in self._held for index in inside)])
        mine = dealt(able, self._nodes.mates)[self._nodes.rank]
        super()._stage({name: [self._held[index] for index in parts[name]] for name in mine})
        self._held = {}


def contents(tensors: Mapping[str, Any]) -> dict[str, list[MetadataIndex]]:
    """Return what each file of the index `tensors` holds, in its order there."""
    found: dict[str, list[tuple[int, MetadataIndex]]] = defaultdict(list)
    for name, entry in tensors.items():
        for chunk in entry["chunks"]:
            found[chunk["file"]].append((chunk["offset"], MetadataIndex(name, chunk["offsets"])))
    return {file: [index for _, index in sorted(inside, key=lambda pair: pair[0])] for file, inside in sorted(found.items())}


def dealt(able: Sequence[Collection[str]], ranks: Sequence[int]) -> dict[int, list[str]]:
    """Deal the parts that `ranks` of one node are `able` to write, each to one: its own, or in turn to who has fewest."""
    mine: dict[int, list[str]] = {rank: [] for rank in ranks}
    for name in sorted({name for rank in ranks for name in able[rank]}):
        chosen = min((rank for rank in ranks if name in able[rank]), key=lambda rank: (name != part_name(rank), len(mine[rank]), rank))
        mine[chosen].append(name)
    return mine
