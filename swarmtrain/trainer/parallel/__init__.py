"""How a model is divided: tensor and pipeline parallel within a replica, data parallel between replicas, on one mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch import Tensor, nn

from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import mesh, pipeline, tensor
from swarmtrain.trainer.parallel.data import Replicas
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.pipeline import Pipeline
from swarmtrain.trainer.parallel.tensor import Shards
from swarmtrain.trainer.runtime import Runtime

_TIED = "embedding.weight"
"""The name that a tied weight goes by, wherever it is used."""


@dataclass(frozen=True)
class ParallelModel:
    """A model as this rank holds it."""

    mesh: Mesh
    local: Transformer
    """This rank's part, which computes without data-parallel communication."""
    replicas: Replicas | Pipeline
    """The same, with gradients summed over replicas."""
    shards: Shards
    parameters: dict[str, nn.Parameter]
    """This rank's plain tensors, by the names of the undivided model."""
    names: tuple[str, ...]
    """Parameters of the undivided model."""
    size: int
    """Numbers in them."""
    twin: str | None
    """The parameter of this rank that counts as the first pipeline stage's, of which it is a copy."""

    def norm(self, gradients: dict[str, Tensor]) -> Tensor:
        """Return the 2-norm of the whole gradient, of which this rank holds `gradients`."""
        part = tensor.norm({name: gradient for name, gradient in gradients.items() if name != self.twin}, self.shards)
        if self.mesh.pipe_size == 1:
            return part
        square = part.double() ** 2
        dist.all_reduce(square, group=self.mesh.pipe_group)
        return square.sqrt().to(part.dtype)


def parallelize(model: Transformer, here: Runtime) -> ParallelModel:
    """Divide `model` over this world. Raises WorldError if the world's size does not fit the topology."""
    layout, config = mesh.build(here), here.config
    whole = dict(model.named_parameters())
    size = sum(parameter.numel() for parameter in whole.values())
    ends = layout.pipe_rank in (0, layout.pipe_size - 1)
    tied = model.tied and layout.pipe_size > 1 and ends
    twin = tied and layout.pipe_rank > 0
    if layout.pipe_size > 1:
        pipeline.cut(model, config, layout)
    model.to(here.device)
    shards = tensor.shard(model, layout.device_mesh["tensor"])
    parameters = tensor.named_parameters(model)
    if twin:
        parameters[_TIED] = parameters.pop("head.weight")
        shards = replace(shards, placements={_TIED if name == "head.weight" else name: how for name, how in shards.placements.items()})
    if layout.pipe_size > 1:
        replicas: Replicas | Pipeline = Pipeline(model, config, layout, here.device, tied=parameters[_TIED] if tied else None)
    else:
        exact = config.transformer_architecture.precision is Precision.float32
        replicas = Replicas(model, layout, here.device, exact=exact)
    return ParallelModel(layout, model, replicas, shards, parameters, tuple(whole), size, _TIED if twin else None)
