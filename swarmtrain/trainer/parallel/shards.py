"""Shards: which parameters are divided, how, and what the whole of them is.

Whoever trains parameters (optimizer, clipping) sees this rank's part of each as a plain tensor; whoever needs the whole
(checkpoints) asks `Shards` for a DTensor that shares the part's memory.
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
class Shards:
    """The layout of every parameter on the mesh tensor x shard."""

    mesh: DeviceMesh
    shapes: Mapping[str, torch.Size]
    """Shapes of the undivided parameters, by name."""
    by_tensor: Mapping[str, Placement]
    """How tensor parallelism divides; parameters that it leaves whole are not in it."""
    by_data: Collection[str]
    """Parameters whose parts are divided again, along their first dimension, over the shard dimension."""
    twins: Collection[str] = ()
    """Parameters of this rank that are copies of another pipeline stage's, which counts them."""
    pipe: dist.ProcessGroup | None = None
    """The ranks that hold the other layers, if there is a pipeline."""

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Return `local`, a tensor laid out like parameter `name`, as a DTensor that shares its memory."""
        if name not in self.by_tensor and name not in self.by_data:
            return local
        shape = self.shapes[name]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self.mesh, self._placements(name), run_check=False, shape=shape, stride=stride)

    def rows(self, name: str) -> Tensor:
        """Return which rows of the whole of parameter `name`, numbers (rows), this rank's part has."""
        found = torch.arange(self.shapes[name][0])
        for placement, count, place in zip(self._placements(name), self.mesh.shape, self.mesh.get_coordinate() or (), strict=True):
            if placement == Shard(0):
                found = ([*found.chunk(count)] + [found[:0]] * count)[place]
        return found

    def counts_here(self, name: str) -> bool:
        """Say whether this rank counts its part of a parameter: of those that hold the same, one does."""
        if name in self.twins:
            return False
        coordinates = zip(self._placements(name), self.mesh.get_coordinate() or (), strict=True)
        return all(placement.is_shard() or place == 0 for placement, place in coordinates)

    def norm(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the 2-norm of all parameters' `tensors` together, of which this rank has its parts, by name.

        Rows are never divided over the shard dimension. Their norms are added in fp64, so how many ranks have them does not show.
        """
        mine = [_rows(tensor) for name, tensor in tensors.items() if self.counts_here(name)]
        first = next(iter(tensors.values()))
        square = torch.cat([first.new_empty(0), *mine]).double().square().sum()
        for group in (*self.mesh.get_all_groups(), *([self.pipe] if self.pipe else [])):
            if group.size() > 1:
                dist.all_reduce(square, group=group)
        return square.sqrt().to(first.dtype)

    def _placements(self, name: str) -> tuple[Placement, Placement]:
        return self.by_tensor.get(name, Replicate()), Shard(0) if name in self.by_data else Replicate()


def _rows(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=tuple(range(1, tensor.dim()))) if tensor.dim() > 1 else tensor
