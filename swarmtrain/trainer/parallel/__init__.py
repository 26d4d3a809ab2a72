"""Model parallelism: a model that is distributed over ranks.

A replica is distributed by tensor, pipeline and context parallelism; replicas are data parallel. All forms use one device mesh.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.ddp import DdpModel, SingleReplicaModel
from swarmtrain.trainer.parallel.fsdp import FsdpModel
from swarmtrain.trainer.parallel.gradient_compression import GradientCompressor
from swarmtrain.trainer.parallel.initial_values import InitialValues
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.pipeline_parallel import PipelineModel
from swarmtrain.trainer.parallel.shard_layout import ShardLayout
from swarmtrain.trainer.parallel.tensor_parallel import sum_partial_gradients

EMBEDDING_WEIGHT = "embedding.weight"
"""Name of the embedding's weight; also used for the output layer's weight if the two are tied."""


@dataclass(frozen=True)
class ParallelModel:
    """One rank's view of a model that is distributed over ranks."""

    mesh: Mesh
    local_model: Transformer
    """This rank's part of the model, without data parallelism: its backward pass does not reduce gradients over replicas."""
    wrapped_model: SingleReplicaModel | DdpModel | FsdpModel | PipelineModel
    """This rank's part of the model with data parallelism: gradients are summed over replicas."""
    shard_layout: ShardLayout
    parameters: dict[str, nn.Parameter]
    """This rank's parameters or shards as plain tensors, by parameter name in the full model."""
    partial_gradient_names: frozenset[str]
    """Names of the parameters of whose gradients each tensor-parallel rank computes a part."""
    parameter_names: tuple[str, ...]
    """Names of all parameters of the full model (all pipeline stages, unsharded)."""
    trained_names: tuple[str, ...]
    """Names of the trained parameters of the full model; all others are frozen."""
    parameter_count: int
    """Number of elements in all parameters of the full model."""
    initial_values: InitialValues
    """Values of the parameters that no checkpoint provides."""
    base_fingerprint: str | None
    """Fingerprint of the model in trainer.init_from; None if trainer.init_from is not set."""

    @property
    def gradient_compressor(self) -> GradientCompressor | None:
        """Compression of gradients over replicas; None if their sums are exact."""
        return self.wrapped_model.compressor if isinstance(self.wrapped_model, DdpModel | PipelineModel) else None

    def start_step(self, number: int) -> None:
        """Prepare the model for the passes of step `number`."""
        if self.gradient_compressor:
            self.gradient_compressor.start_step(number)

    def assign_micro_batches(self, counts: tuple[int, ...]) -> ParallelModel:
        """Return this model with `counts` micro batches per replica; it shares all parameters with this object."""
        return replace(self, mesh=replace(self.mesh, micro_batches_per_replica=counts))

    def sum_partial_gradients(self) -> None:
        """Sum the gradients over tensor-parallel ranks of which each has a part, in place. Collective: all ranks must call it."""
        gradients = [parameter.grad for name, parameter in self.parameters.items() if name in self.partial_gradient_names]
        sum_partial_gradients([gradient for gradient in gradients if gradient is not None], self.mesh.tensor_group)
