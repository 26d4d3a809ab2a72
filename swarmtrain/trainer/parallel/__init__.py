"""How a model is divided: tensor parallel within a replica, data parallel between replicas, on one mesh."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import mesh, tensor
from swarmtrain.trainer.parallel.data import Replicas
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.tensor import Shards
from swarmtrain.trainer.runtime import Runtime


@dataclass(frozen=True)
class ParallelModel:
    """A model as this rank holds it."""

    mesh: Mesh
    local: Transformer
    """This rank's part, which computes without data-parallel communication."""
    replicas: Replicas
    """The same, with gradients summed over replicas."""
    shards: Shards
    parameters: dict[str, nn.Parameter]
    """This rank's plain tensors, by the names of the undivided model."""
    size: int
    """Parameters of the undivided model."""


def parallelize(model: Transformer, here: Runtime) -> ParallelModel:
    """Divide `model` over this world. Raises WorldError if the world's size does not fit the topology."""
    layout = mesh.build(here)
    model.to(here.device)
    size = sum(parameter.numel() for parameter in model.parameters())
    shards = tensor.shard(model, layout.device_mesh["tensor"])
    exact = here.config.transformer_architecture.precision is Precision.float32
    replicas = Replicas(model, layout, here.device, exact=exact)
    return ParallelModel(layout, model, replicas, shards, tensor.named_parameters(model), size)
