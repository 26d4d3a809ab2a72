"""Shard layout: which parameters are sharded, how, and what the full parameters are.

Code that trains parameters (optimizer, clipping) sees this rank's part of each as a plain tensor; code that needs full parameters
(checkpoints) asks `ShardLayout` for a DTensor that shares the part's memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard


@dataclass(frozen=True)
class ShardLayout:
    """The layout of every parameter on the mesh tensor x shard."""

    mesh: DeviceMesh
    shapes: Mapping[str, torch.Size]
    """Shapes of the undivided parameters, by name."""
    tensor_placements: Mapping[str, Placement]
    """Tensor-parallel placements; parameters that tensor parallelism does not divide are absent."""
    fsdp_names: Collection[str]
    """Parameters whose parts are divided again, along their first dimension, over the shard dimension."""
    tied_copies: Collection[str] = ()
    """Parameters of this rank that are copies of another pipeline stage's, which counts them."""
    pipeline_group: dist.ProcessGroup | None = None
    """The ranks that hold the other layers, with pipeline parallelism."""

    def wrap_as_dtensor(self, name: str, local: Tensor) -> Tensor:
        """Return `local`, a tensor laid out like parameter `name`, as a DTensor that shares its memory."""
        if name not in self.tensor_placements and name not in self.fsdp_names:
            return local
        shape = self.shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self._find_placements(name), run_check=False, shape=shape, stride=stride)

    def find_local_rows(self, name: str) -> Tensor:
        """Return the row indices (rows) of the full parameter `name` that this rank's part has."""
        rows = torch.arange(self.shapes[name][0])
        for placement, count, coordinate in zip(
            self._find_placements(name), self.mesh.shape, self.mesh.get_coordinate() or (), strict=True
        ):
            if placement == Shard(0):
                rows = ([*rows.chunk(count)] + [rows[:0]] * count)[coordinate]
        return rows

    def is_primary_copy(self, name: str) -> bool:
        """Return whether this rank counts its part of a parameter: exactly one of the ranks that hold the same part does."""
        if name in self.tied_copies:
            return False
        coordinates = zip(self._find_placements(name), self.mesh.get_coordinate() or (), strict=True)
        return all(placement.is_shard() or coordinate == 0 for placement, coordinate in coordinates)

    def compute_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm over all parameters of `tensors`, of which this rank has its parts, by name.

        Rows are never divided over the shard dimension, and their norms are added in fp64, so the result does not depend on the number of
        ranks that hold them.
        """
        row_norms = [_compute_row_norms(tensor) for name, tensor in tensors.items() if self.is_primary_copy(name)]
        example = next(iter(tensors.values()))
        squared_norm = torch.cat([example.new_empty(0), *row_norms]).double().square().sum()
        for group in (*self.mesh.get_all_groups(), *([self.pipeline_group] if self.pipeline_group else [])):
            if group.size() > 1:
                dist.all_reduce(squared_norm, group=group)
        return squared_norm.sqrt().to(example.dtype)

    def _find_placements(self, name: str) -> tuple[Placement, Placement]:
        return self.tensor_placements.get(name, Replicate()), Shard(0) if name in self.fsdp_names else Replicate()


def _compute_row_norms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim()))) if tensor.dim() > 1 else tensor
