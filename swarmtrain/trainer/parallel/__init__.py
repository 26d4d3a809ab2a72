"""How a model is divided: tensor and pipeline parallel within a replica, data parallel between replicas, on one mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from swarmtrain.config.topology import DataParallelType, TopologyConfig
from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import compiled, context, mesh, pipeline, recompute, tensor
from swarmtrain.trainer.parallel.data import Alone, Replicas
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.pipeline import Pipeline
from swarmtrain.trainer.parallel.sharded import ShardedReplicas
from swarmtrain.trainer.parallel.shards import Shards
from swarmtrain.trainer.runtime import Runtime

_TIED = "embedding.weight"
"""The name that a tied weight goes by, wherever it is used."""


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
    size: int
    """Numbers in them."""


def parallelize(model: Transformer, here: Runtime) -> ParallelModel:
    """Divide `model` over this world. Raises WorldError if the world's size does not fit the topology, and TrainingError
    if it is to be compiled and cannot be.
    """
    config, layout = here.config, mesh.build(here)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    # A sum of two numbers is rounded once, however it is made.
    exact = config.transformer_architecture.precision is Precision.float32 and _summands(config.topology) > 2
    piped = layout.pipe_size > 1
    tied = piped and model.tied and layout.pipe_rank in (0, layout.pipe_size - 1)
    twin = tied and layout.pipe_rank > 0
    if piped:
        pipeline.cut(model, config, layout)
    model.to(here.device, torch.float64 if config.transformer_architecture.precision is Precision.float64 else None)
    by_tensor = tensor.shard(model, layout.device_mesh["tensor"], sequence=config.topology.sequence_parallel)
    if layout.context_mesh:
        context.share(model, layout.context_mesh)
    recompute.layers(model, config.topology.activation_checkpointing_type)
    names = list(tensor.named_parameters(model))
    if twin:
        names = [_TIED if name == "head.weight" else name for name in names]
        by_tensor = {_TIED if name == "head.weight" else name: how for name, how in by_tensor.items()}
    divided = config.optimizer.zero or config.topology.data_parallel_type is not DataParallelType.ddp
    if piped:
        place = names.index(_TIED) if tied else None
        replicas: Alone | Replicas | ShardedReplicas | Pipeline = Pipeline(model, config, layout, here.device, divided=divided, tied=place)
    elif divided:
        replicas = ShardedReplicas(model, config, layout)
    elif layout.data_group.size() == 1:
        replicas = Alone(model, exact=exact)
    else:
        replicas = Replicas(model, layout, here.device, exact=exact)
    if config.trainer.compile:
        compiled.blocks(model, here.device)
    by_data = frozenset(names if divided else ())
    pipe = layout.pipe_group if piped else None
    shards = Shards(layout.state_mesh["tensor", "shard"], shapes, by_tensor, by_data, {_TIED} if twin else (), pipe)
    size = sum(shape.numel() for shape in shapes.values())
    return ParallelModel(layout, model, replicas, shards, dict(zip(names, replicas.parameters, strict=True)), tuple(shapes), size)


def _summands(topology: TopologyConfig) -> int:
    """Return how many gradients of one parameter are added up in a step."""
    return topology.micro_batches * topology.context_parallel_size
