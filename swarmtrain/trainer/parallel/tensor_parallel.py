"""Tensor parallelism: `parallelize_module` shards the model, then every shard becomes a plain tensor again.

parallelize_module creates DTensor parameters, which DistributedDataParallel cannot reduce and some optimizers do not support. So the local
shard of each is registered as the parameter, with a parametrization that presents it to the layer as a DTensor. All code that handles
parameters (DDP, fully_shard, AdamW, gradient clipping) receives plain tensors.
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
from swarmtrain.trainer.model.embedding_head import EmbeddingHead
from swarmtrain.trainer.model.peft import ADAPTER_KEY, LORA_KEY
from swarmtrain.trainer.model.peft.lora import Lora
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.vocabulary_parallel_loss import VocabularyParallelLoss

_ROWWISE_LAYERS = ("output", "down")
_PER_HEAD_MODULES = ("query_norm", "key_norm")
_PER_POSITION_MODULES = ("positions",)
_SEQUENCE_SHARDED_ADAPTERS = ("output.b", "down.b", "down_projection", "up_projection")
"""Name suffixes of PEFT modules whose input under sequence parallelism has only this rank's positions.

These are adapters, and LoRA's B matrices of row-parallel layers.
"""


class _AsDTensor(nn.Module):
    """Parametrization that presents a layer's local shard as the DTensor that the layer's parallel style expects."""

    def __init__(self, mesh: DeviceMesh, placement: Placement) -> None:
        super().__init__()
        self.mesh = mesh
        self.placement = placement

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(local, self.mesh, [self.placement], run_check=False)


class _SummedGradient(nn.Module):
    """Parametrization of a replicated parameter that sums its gradient over ranks.

    Each rank computes the gradient from only its own heads or positions.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, local: Tensor) -> Tensor:
        return DTensor.from_local(local, self.mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh, *, sequence_parallel: bool) -> dict[str, Placement]:
    """Shard `model` in place over the one-dimensional `mesh`. Return the placements of sharded parameters, by name.

    `sequence_parallel`: between attention and feed-forward blocks each rank has only a part of the sequence, whose length must be a
    multiple of the number of ranks.
    """
    if mesh.size() == 1:
        return {}
    parallelize_module(model, mesh, _build_parallelize_plan(model, sequence_parallel=sequence_parallel), src_data_rank=None)
    model.loss = VocabularyParallelLoss(mesh.get_group())
    model.model_coordinate = model.model_coordinate[0], mesh.get_local_rank()
    if sequence_parallel:
        model.sequence_parallel_coordinate = mesh.get_local_rank(), mesh.size()
    placements: dict[str, Placement] = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in list(module._parameters.items()):
            if isinstance(parameter, DTensor):
                placement = parameter.placements[0]
                if placement.is_shard():
                    placements[f"{name}.{parameter_name}"] = placement
                setattr(module, parameter_name, nn.Parameter(parameter.to_local().clone()))
                parametrize.register_parametrization(module, parameter_name, _AsDTensor(mesh, placement), unsafe=True)
            elif parameter is not None and _has_partial_gradient(name, sequence_parallel=sequence_parallel):
                parametrize.register_parametrization(module, parameter_name, _SummedGradient(mesh), unsafe=True)
        if isinstance(module, Lora) and name.endswith(_ROWWISE_LAYERS):
            module.dropout.first_dimension = mesh.get_local_rank() * module.a.in_features // mesh.size()
        if isinstance(module, Attention):
            module.first_head = mesh.get_local_rank() * (model.architecture.num_attention_heads // mesh.size())
    if model.has_tied_embeddings:
        head, embedding = model.head.get_submodule("parametrizations.weight"), model.embedding.get_submodule("parametrizations.weight")
        head.original = embedding.original
        placements.pop("head.weight")
    return placements


def _has_partial_gradient(module_name: str, *, sequence_parallel: bool) -> bool:
    """Return whether the parameters of `module_name` are replicated, but each rank computes only a part of their gradient."""
    is_per_position = module_name.endswith(_PER_POSITION_MODULES) or (
        (LORA_KEY in module_name or ADAPTER_KEY in module_name) and module_name.endswith(_SEQUENCE_SHARDED_ADAPTERS)
    )
    return module_name.endswith(_PER_HEAD_MODULES) or (sequence_parallel and is_per_position)


def collect_parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `model`, by their names in the unsharded model."""
    return {name.replace("parametrizations.", "").removesuffix(".original"): parameter for name, parameter in model.named_parameters()}


def _build_parallelize_plan(model: Transformer, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
    residual_layout: Placement = Shard(1) if sequence_parallel else Replicate()
    rowwise, colwise = RowwiseParallel(output_layouts=residual_layout), ColwiseParallel()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual_layout),
    }
    if not isinstance(model.head, EmbeddingHead):
        plan["head"] = ColwiseParallel(input_layouts=residual_layout)
    elif sequence_parallel:
        plan["head"] = PrepareModuleInput(input_layouts=residual_layout, desired_input_layouts=Replicate())
    for name, _ in model.named_modules():
        parent, _, leaf = name.rpartition(".")
        if LORA_KEY in name:
            is_rowwise = parent.endswith(_ROWWISE_LAYERS)
            if leaf == "a" and is_rowwise:
                plan[name] = rowwise
            elif leaf == "b" and not is_rowwise:
                plan[name] = colwise
        elif leaf in ("query", "key", "value", "up", "gate"):
            plan[name] = colwise
        elif leaf in _ROWWISE_LAYERS:
            plan[name] = rowwise
        elif sequence_parallel and leaf in ("attention_norm", "mlp_norm", "norm"):
            plan[name] = SequenceParallel()
        elif sequence_parallel and leaf in ("attention", "mlp"):
            plan[name] = PrepareModuleInput(input_layouts=residual_layout, desired_input_layouts=Replicate())
    # Modules of other pipeline stages are not on this rank, so it cannot shard them.
    return {name: style for name, style in plan.items() if _is_local_module(model.get_submodule(name))}


def _is_local_module(module: nn.Module) -> bool:
    return isinstance(module, EmbeddingHead) or next(module.parameters(), None) is not None
