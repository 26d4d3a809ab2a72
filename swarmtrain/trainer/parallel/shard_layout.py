"""Shard layout: how each parameter is sharded over ranks, and the shape of the full parameter.

The optimizer and gradient clipping use this rank's shard of each parameter as a plain tensor. Checkpoints need full parameters:
`ShardLayout` returns DTensors that share the shards' memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from swarmtrain.trainer.model.initialization import Region, select_all


@dataclass(frozen=True)
class ShardLayout:
    """The sharding of every parameter over the mesh dimensions tensor and shard."""

    mesh: DeviceMesh
    shapes: Mapping[str, torch.Size]
    """Shapes of the full parameters, by name."""
    tensor_placements: Mapping[str, Placement]
    """Tensor-parallel placement of each sharded parameter, by name; parameters that are not tensor-parallel are absent."""
    fsdp_names: Collection[str]
    """Names of the parameters that are also sharded over the shard dimension, along their first dimension."""
    tied_copies: Collection[str] = ()
    """Names of this rank's parameters that are tied copies of a parameter on another pipeline stage. Only the other stage counts them in
    norms."""
    pipeline_group: dist.ProcessGroup | None = None
    """Process group of this rank's pipeline, whose other ranks hold the other layers; None without pipeline parallelism."""

    def wrap_as_dtensor(self, parameter_name: str, local_tensor: Tensor) -> Tensor:
        """Return `local_tensor`, a tensor with the shard layout of `parameter_name`, as a DTensor that shares its memory.

        Unsharded tensors are returned unchanged.
        """
        if parameter_name not in self.tensor_placements and parameter_name not in self.fsdp_names:
            return local_tensor
        shape = self.shapes[parameter_name]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            local_tensor, self.mesh, self._find_placements(parameter_name), run_check=False, shape=shape, stride=stride
        )

    def find_local_region(self, parameter_name: str) -> Region:
        """Return which part of the full parameter `parameter_name` is this rank's shard."""
        region = [*select_all(self.shapes[parameter_name])]
        for placement, count, coordinate in zip(
            self._find_placements(parameter_name), self.mesh.shape, self.mesh.get_coordinate() or (), strict=True
        ):
            if isinstance(placement, Shard):
                full = region[placement.dim]
                length = math.ceil((full.stop - full.start) / count)  # as torch.chunk: the last shards can be shorter, or empty
                start = min(full.start + coordinate * length, full.stop)
                region[placement.dim] = slice(start, min(start + length, full.stop))
        return tuple(region)

    def is_primary_copy(self, parameter_name: str) -> bool:
        """Return whether this rank counts its shard of `parameter_name` in norms; of the ranks that hold it, exactly one does."""
        if parameter_name in self.tied_copies:
            return False
        coordinates = zip(self._find_placements(parameter_name), self.mesh.get_coordinate() or (), strict=True)
        return all(placement.is_shard() or coordinate == 0 for placement, coordinate in coordinates)

    def compute_global_norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm over all full tensors, given this rank's shard of each in `tensors`, by parameter name.

        Collective: all ranks must call it.

        Rows are never split over the shard dimension, and the norms of rows are added in float64, so the result does not depend on the
        number of ranks.
        """
        row_norms = [_compute_row_norms(tensor) for name, tensor in tensors.items() if self.is_primary_copy(name)]
        example = next(iter(tensors.values()))
        squared_norm = torch.cat([example.new_empty(0), *row_norms]).double().square().sum()
        for group in (*self.mesh.get_all_groups(), *([self.pipeline_group] if self.pipeline_group else [])):
            if group.size() > 1:
                dist.all_reduce(squared_norm, group=group)
        return squared_norm.sqrt().to(example.dtype)

    def _find_placements(self, parameter_name: str) -> tuple[Placement, Placement]:
        return self.tensor_placements.get(parameter_name, Replicate()), Shard(0) if parameter_name in self.fsdp_names else Replicate()


def _compute_row_norms(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim()))) if tensor.dim() > 1 else tensor
