"""How a model is divided: tensor parallel within a replica, data parallel between replicas, on one mesh."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from swarmtrain.config.topology import DataParallelType
from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import mesh, tensor
from swarmtrain.trainer.parallel.data import Replicas
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.sharded import ShardedReplicas
from swarmtrain.trainer.parallel.shards import Shards
from swarmtrain.trainer.runtime import Runtime


@dataclass(frozen=True)
class ParallelModel:
    """A model as this rank holds it."""

    mesh: Mesh
    local: Transformer
    """This rank's part, whose forward pass leaves no gradients to add."""
    replicas: Replicas | ShardedReplicas
    """The same, with gradients summed over replicas."""
    shards: Shards
    parameters: dict[str, nn.Parameter]
    """This rank's plain tensors, by the names of the undivided model."""
    size: int
    """Parameters of the undivided model."""


def parallelize(model: Transformer, here: Runtime) -> ParallelModel:
    """Divide `model` over this world. Raises WorldError if the world's size does not fit the topology."""
    config, layout = here.config, mesh.build(here)
    precision = config.transformer_architecture.precision
    model.to(here.device, torch.float64 if precision is Precision.float64 else None)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    by_tensor = tensor.shard(model, layout.device_mesh["tensor"], sequence=config.topology.sequence_parallel)
    exact = precision is Precision.float32
    names, by_data = list(tensor.named_parameters(model)), []
    if config.topology.data_parallel_type is DataParallelType.ddp and not config.optimizer.zero:
        replicas: Replicas | ShardedReplicas = Replicas(model, layout, here.device, exact=exact)
        parameters = list(model.parameters())
    else:
        keep = config.topology.data_parallel_type is DataParallelType.ddp
        replicas = ShardedReplicas(model, layout, exact=exact, keep=keep)
        parameters, by_data = replicas.parameters, names
    shards = Shards(layout.device_mesh["tensor", "shard"], shapes, by_tensor, frozenset(by_data))
    size = sum(shape.numel() for shape in shapes.values())
    return ParallelModel(layout, model, replicas, shards, dict(zip(names, parameters, strict=True)), size)
