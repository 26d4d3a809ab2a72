"""Tensor parallelism: `parallelize_module` shards the model, then every shard becomes a plain tensor again.

parallelize_module leaves DTensor parameters behind, which DistributedDataParallel cannot reduce and some optimizers
do not know. So each of them is re-registered as its local shard, with a parametrization that shows the layer the DTensor.
Whoever handles parameters (DDP, AdamW, clipping) sees plain tensors; whoever needs the whole (checkpoints) asks `Shards`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

from swarmtrain.trainer.model.transformer import Transformer


@dataclass(frozen=True)
class Shards:
    """Which parameters are sharded over the tensor mesh, and how."""

    mesh: DeviceMesh
    placements: dict[str, Placement]

    def whole(self, name: str, local: Tensor) -> Tensor:
        """Return `local`, a tensor laid out like parameter `name`, as a DTensor that shares its memory."""
        if name not in self.placements:
            return local
        return DTensor.from_local(local, self.mesh, [self.placements[name]], run_check=False)


class _Whole(nn.Module):
    """Shows a layer its local shard as the DTensor that its parallel style expects."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.mesh = mesh
        self.placement = placement

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False)


def shard(model: Transformer, mesh: DeviceMesh) -> Shards:
    """Shard `model` in place over `mesh`, which has one dimension."""
    if mesh.size() == 1:
        return Shards(mesh, {})
    parallelize_module(model, mesh, _plan(model), src_data_rank=None)
    placements = {}
    for name, module in model.named_modules():
        parameter = module._parameters.get("weight")
        if isinstance(parameter, DTensor):
            placement = parameter.placements[0]
            placements[f"{name}.weight"] = placement
            module.weight = nn.Parameter(parameter.to_local().clone())
            parametrize.register_parametrization(module, "weight", _Whole(mesh, placement), unsafe=True)
    if model.tied:
        head, embedding = model.head.get_submodule("parametrizations.weight"), model.embedding.get_submodule("parametrizations.weight")
        head.original = embedding.original
        placements.pop("head.weight")
    return Shards(mesh, placements)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` by the names they have in an unsharded one."""
    return {name.replace("parametrizations.", "").removesuffix(".original"): parameter for name, parameter in model.named_parameters()}


def _plan(model: Transformer) -> dict[str, ParallelStyle]:
    by_row, by_column = RowwiseParallel(), ColwiseParallel()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for index, block in enumerate(model.blocks):
        for name, _ in block.named_modules():
            last = name.rpartition(".")[2]
            if last in ("query", "key", "value", "up", "gate"):
                plan[f"blocks.{index}.{name}"] = by_column
            elif last in ("output", "down"):
                plan[f"blocks.{index}.{name}"] = by_row
    return {name: style for name, style in plan.items() if isinstance(model.get_submodule(name), (nn.Embedding, nn.Linear))}


def norm(gradients: dict[str, Tensor], shards: Shards) -> Tensor:
    """Return the 2-norm of the whole gradient, of which this rank holds `gradients`: shards and whole tensors."""
    sharded = [gradient for name, gradient in gradients.items() if name in shards.placements]
    whole = [gradient for name, gradient in gradients.items() if name not in shards.placements]
    square = nn.utils.get_total_norm(whole) ** 2 if whole else torch.zeros(())
    if sharded:
        part = nn.utils.get_total_norm(sharded) ** 2
        torch.distributed.all_reduce(part, group=shards.mesh.get_group())
        square = square + part
    return square.sqrt()
