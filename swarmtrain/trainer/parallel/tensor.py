"""Tensor parallelism: `parallelize_module` shards the model, then every shard becomes a plain tensor again.

parallelize_module leaves DTensor parameters behind, which DistributedDataParallel cannot reduce and some optimizers
do not know. So each of them is re-registered as its local shard, with a parametrization that shows the layer the DTensor.
Whoever handles parameters (DDP, fully_shard, AdamW, clipping) sees plain tensors.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import parametrize

from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.beside import ADAPTER, LORA
from swarmtrain.trainer.model.embedding import EmbeddingHead
from swarmtrain.trainer.model.lora import Lora
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.loss import VocabularyParallelLoss

_BY_ROW = ("output", "down")
_OF_HEADS = ("query_norm", "key_norm")
_OF_PLACES = ("positions",)
_BETWEEN = ("output.b", "down.b", "narrow", "wide")
"""What stands beside, where each rank sees its own places if sequences are divided: adapters, and LoRA's second matrices beside layers
that are divided by rows."""


class _Whole(nn.Module):
    """Shows a layer its local shard as the DTensor that its parallel style expects."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.mesh = mesh
        self.placement = placement

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False)


class _Shared(nn.Module):
    """Shows a layer a parameter of which every rank has all, and makes its gradient the sum of what ranks have: each saw its own heads,
    or its own places."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(local, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def shard(model: Transformer, mesh: DeviceMesh, *, sequence: bool) -> dict[str, Placement]:
    """Shard `model` in place over `mesh`, which has one dimension. Return how, by the names of parameters that are divided.

    `sequence`: between attention and feed-forward blocks each rank has a part of the sequence, which must be a multiple of ranks.
    """
    if mesh.size() == 1:
        return {}
    parallelize_module(model, mesh, _plan(model, sequence=sequence), src_data_rank=None)
    model.loss = VocabularyParallelLoss(mesh.get_group())
    model.place = model.place[0], mesh.get_local_rank()
    if sequence:
        model.sequence_part = mesh.get_local_rank(), mesh.size()
    placements: dict[str, Placement] = {}
    for name, module in model.named_modules():
        for kind, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                placement = parameter.placements[0]
                if placement.is_shard():
                    placements[f"{name}.{kind}"] = placement
                setattr(module, kind, nn.Parameter(parameter.to_local().clone()))
                parametrize.register_parametrization(module, kind, _Whole(mesh, placement), unsafe=True)
            elif parameter is not None and _seen_in_part(name, sequence=sequence):
                parametrize.register_parametrization(module, kind, _Shared(mesh), unsafe=True)
        if isinstance(module, Lora) and name.endswith(_BY_ROW):
            module.dropout.first = mesh.get_local_rank() * module.a.in_features // mesh.size()
        if isinstance(module, Attention):
            module.first_head = mesh.get_local_rank() * (model.shape.num_attention_heads // mesh.size())
    if model.tied:
        head, embedding = model.head.get_submodule("parametrizations.weight"), model.embedding.get_submodule("parametrizations.weight")
        head.original = embedding.original
        placements.pop("head.weight")
    return placements


def _seen_in_part(name: str, *, sequence: bool) -> bool:
    """Return whether each rank sees only a part of what the parameters of module `name` are used for, and has all of them."""
    of_places = name.endswith(_OF_PLACES) or ((LORA in name or ADAPTER in name) and name.endswith(_BETWEEN))
    return name.endswith(_OF_HEADS) or (sequence and of_places)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `model` by the names they have in an unsharded one."""
    return {name.replace("parametrizations.", "").removesuffix(".original"): parameter for name, parameter in model.named_parameters()}


def _plan(model: Transformer, *, sequence: bool) -> dict[str, ParallelStyle]:
    between: Placement = Shard(1) if sequence else Replicate()
    by_row, by_column = RowwiseParallel(output_layouts=between), ColwiseParallel()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
    }
    if not isinstance(model.head, EmbeddingHead):
        plan["head"] = ColwiseParallel(input_layouts=between)
    elif sequence:
        plan["head"] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    for name, _ in model.named_modules():
        around, _, last = name.rpartition(".")
        if LORA in name:
            by_rows = around.endswith(_BY_ROW)
            if last == "a" and by_rows:
                plan[name] = by_row
            elif last == "b" and not by_rows:
                plan[name] = by_column
        elif last in ("query", "key", "value", "up", "gate"):
            plan[name] = by_column
        elif last in _BY_ROW:
            plan[name] = by_row
        elif sequence and last in ("attention_norm", "mlp_norm", "norm"):
            plan[name] = SequenceParallel()
        elif sequence and last in ("attention", "mlp"):
            plan[name] = PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate())
    # What another stage of a pipeline holds is not here to be divided.
    return {name: style for name, style in plan.items() if _is_here(model.get_submodule(name))}


def _is_here(module: nn.Module) -> bool:
    return isinstance(module, EmbeddingHead) or next(module.parameters(), None) is not None
