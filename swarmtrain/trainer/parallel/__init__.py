"""How a model is divided: tensor and pipeline parallel within a replica, data parallel between replicas, on one mesh."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Shard

from swarmtrain.config import Config
from swarmtrain.config.pipeline import cuts
from swarmtrain.config.topology import DataParallelType, TopologyConfig
from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.errors import TrainingError
from swarmtrain.trainer.checkpoint import whole
from swarmtrain.trainer.checkpoint.whole import Base
from swarmtrain.trainer.model import initial, preference
from swarmtrain.trainer.model.beside import is_beside
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import compiled, context, mesh, pipeline, recompute, tensor
from swarmtrain.trainer.parallel.data import Alone, Replicas
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.pipeline import Pipeline
from swarmtrain.trainer.parallel.sharded import Fill, ShardedReplicas
from swarmtrain.trainer.parallel.shards import Shards
from swarmtrain.trainer.runtime import Runtime

EMBEDDING = "embedding.weight"
"""The name that a tied weight goes by too, wherever it is used."""


@dataclass(frozen=True)
class ParallelModel:
    """A model as this rank holds it."""

    mesh: Mesh
    local: Transformer
    """This rank's part, whose forward pass leaves no gradients to add."""
    replicas: Alone | Replicas | ShardedReplicas | Pipeline
    """The same, with gradients summed over replicas."""
    shards: Shards
    parameters: dict[str, nn.Parameter]
    """This rank's plain tensors, by the names of the undivided model."""
    names: tuple[str, ...]
    """Parameters of the undivided model."""
    trained: tuple[str, ...]
    """Those that steps change; the others stay as they are."""
    size: int
    """Numbers in them."""
    base: str | None
    """The fingerprint of trainer.init_from."""


def parallelize(model: Transformer, here: Runtime) -> ParallelModel:
    """Divide `model` over this world. Raises WorldError if the world's size does not fit the topology, TrainingError if it is to
    be compiled and cannot be, and CheckpointError if trainer.init_from is not this model or cannot be read.
    """
    config, layout = here.config, mesh.build(here)
    if config.trainer.preference_config:
        model.preference = preference.Preference(config.trainer.preference_config)
        preference.learn(model)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    tied = layout.pipe_size > 1 and model.tied and layout.pipe_rank in (0, layout.pipe_size - 1)
    twin = tied and layout.pipe_rank > 0
    by_tensor = _take_part(model, config, layout)
    local = tensor.named_parameters(model)
    if twin:
        local = {EMBEDDING if name == "head.weight" else name: parameter for name, parameter in local.items()}
        by_tensor = {EMBEDDING if name == "head.weight" else name: how for name, how in by_tensor.items()}
    trained = trained_names(shapes, config)
    for name, parameter in local.items():
        parameter.requires_grad_(name in trained)
    names = {parameter: name for name, parameter in local.items()}
    if base := _base(here, shapes):
        model.initial = partial(_begins, base, model.initial)
    fill = partial(initial.fill, names=names, value=_values(model, layout, shapes, by_tensor, copied=base is not None), device=here.device)
    replicas = _replicas(model, here, layout, fill, tied=list(local).index(EMBEDDING) if tied else None)
    half = config.transformer_architecture.precision is Precision.float16
    model.loss_chunk = None if half else config.trainer.loss_chunk_size
    if config.trainer.compile:
        compiled.blocks(model, here.device)
    pipe = layout.pipe_group if layout.pipe_size > 1 else None
    by_data = frozenset(local if _divided(config) else ())
    shards = Shards(layout.state_mesh["tensor", "shard"], shapes, by_tensor, by_data, {EMBEDDING} if twin else (), pipe)
    size = sum(shape.numel() for shape in shapes.values())
    mine = dict(zip(local, replicas.parameters, strict=True))
    return ParallelModel(layout, model, replicas, shards, mine, tuple(shapes), tuple(trained), size, base.fingerprint if base else None)


def trained_names(names: Iterable[str], config: Config) -> list[str]:
    """Return those of the undivided model's parameters that are trained.

    Raises TrainingError if there are none, or a pipeline's stage has none: nothing would come back from it.
    """
    wanted, names = config.trainer.finetunable_parameters, list(names)
    if wanted is not None:
        found = [name for name in names if any(re.search(pattern, name) for pattern in wanted)]
    elif config.transformer_architecture.beside or config.trainer.finetunable_token_ids:
        found = [name for name in names if is_beside(name)]
    else:
        found = names
    if config.trainer.finetunable_token_ids:
        found = [name for name in names if name in found or name == EMBEDDING]
    place = "config trainer.finetunable_parameters"
    if not found:
        raise TrainingError("matches no parameter", place=place, hint=f"they are named like {', '.join(names[:3])}")
    stages = cuts(config.topology, config.transformer_architecture)
    for number, layers in enumerate(stages if len(stages) > 1 else ()):
        own = [f"blocks.{layer}." for layer in layers]
        tied = ["embedding."] if config.transformer_architecture.tied else []
        own += ["embedding.", "positions."] if number == 0 else ["norm.", "head.", *tied] if number == len(stages) - 1 else []
        if not any(name.startswith(tuple(own)) for name in found):
            raise TrainingError(f"matches nothing in stage {number} of the pipeline", place=place, hint="train something in each of them")
    return found


def _take_part(model: Transformer, config: Config, layout: Mesh) -> dict[str, Placement]:
    """Leave in `model` what is this rank's. Return how tensor parallelism divides parameters, by name."""
    if layout.pipe_size > 1:
        pipeline.cut(model, config, layout)
    by_tensor = tensor.shard(model, layout.device_mesh["tensor"], sequence=config.topology.sequence_parallel)
    if layout.context_mesh:
        context.share(model, layout.context_mesh)
    recompute.layers(model, config.topology.activation_checkpointing_type)
    return by_tensor


def _base(here: Runtime, shapes: Mapping[str, torch.Size]) -> Base | None:
    """Return trainer.init_from, if there is one. Raises CheckpointError."""
    folder = here.config.trainer.init_from
    if folder is None:
        return None
    known = {name: shape for name, shape in shapes.items() if not is_beside(name)}
    return whole.base(folder, here.config.transformer_architecture, known, share=(here.rank, here.size))


def _begins(base: Base, otherwise: Callable[[str, torch.Size], Tensor], name: str, size: torch.Size) -> Tensor:
    return otherwise(name, size) if is_beside(name) else base.value(name, size)


def _values(
    model: Transformer, layout: Mesh, shapes: Mapping[str, torch.Size], by_tensor: Mapping[str, Placement], *, copied: bool
) -> Callable[[str], Tensor]:
    """Return what gives this rank's part of a parameter, by its name in the undivided model, before the first step.

    `copied`: what the model begins with is no memory of its own, but a file's.
    """
    precision = torch.float64 if model.shape.precision is Precision.float64 else torch.float32

    def value(name: str) -> Tensor:
        whole, how = model.initial(name, shapes[name]), by_tensor.get(name)
        mine = whole.chunk(layout.tensor_size, how.dim)[layout.tensor_rank] if isinstance(how, Shard) else whole
        return mine.to(precision, copy=mine is not whole or copied, memory_format=torch.contiguous_format)

    return value


def _replicas(
    model: Transformer, here: Runtime, layout: Mesh, fill: Fill, *, tied: int | None
) -> Alone | Replicas | ShardedReplicas | Pipeline:
    """Return `model`, filled, as one with what other replicas have of it. `tied`: the place of a weight whose copy another stage has."""
    config = here.config
    # A sum of two numbers is rounded once, however it is made.
    exact = config.transformer_architecture.precision is Precision.float32 and _summands(config.topology) > 2
    if not _divided(config):
        fill(model)
    if layout.pipe_size > 1:
        return Pipeline(model, config, layout, here.device, divided=fill if _divided(config) else None, tied=tied)
    if _divided(config):
        return ShardedReplicas(model, config, layout, fill)
    return Alone(model, exact=exact) if layout.data_group.size() == 1 else Replicas(model, layout, here.device, exact=exact)


def _divided(config: Config) -> bool:
    """Return whether replicas divide their state."""
    return config.optimizer.zero or config.topology.data_parallel_type is not DataParallelType.ddp


def _summands(topology: TopologyConfig) -> int:
    """Return how many gradients of one parameter are added up in a step."""
    return topology.micro_batches * topology.context_parallel_size
