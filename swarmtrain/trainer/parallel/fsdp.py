"""Data parallelism with sharded state (FSDP, ZeRO), with summed instead of averaged gradients.

Uses torch's `fully_shard` with one group per block. Each rank holds a shard of every parameter, of its gradient and of its optimizer
state, and gathers a block's parameters when they are needed. In float32, gradients are summed in float64 (see ddp.py), so the losses
equal those of one process. In bfloat16 and float16, parameters are gathered in that type, and gradients are summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from swarmtrain.config import Config
from swarmtrain.config.schema.topology import DataParallelType
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.working_weights import get_sum_dtype, get_working_dtype

Materializer = Callable[[nn.Module], None]
"""Function that materializes the parameters of a module from the meta device."""


class FsdpParameters:
    """This rank's parameter shards of a model that is sharded by `fully_shard`, as plain tensors."""

    def __init__(
        self,
        model: Transformer,
        stages: Sequence[Transformer],
        config: Config,
        mesh: Mesh,
        materialize: Materializer,
        *,
        keep_gathered: bool,
    ) -> None:
        """Shard `model` in place.

        `stages`: the models that forward passes run through: `model` itself, or one view of it per pipeline stage. The model is on the
        meta device: `materialize` is called for each block right before it is sharded, so that at most one block is in memory unsharded.
        `keep_gathered`: keep gathered parameters after the forward pass, until a backward pass reshards them.
        """
        precision, device_mesh = config.transformer_architecture.precision, mesh.device_mesh
        # Sums that are still to be reduced over replicas are kept in the type in which they are reduced. Sums that fully_shard completes in
        # each backward pass have the type of the parameters, so float64 sums need a dimension of replicas, if only of one.
        keeps_float64_sums = precision is Precision.float32 and reduces_every_micro_batch(config)
        is_hybrid = keeps_float64_sums or device_mesh["replica"].size() > 1
        options: dict[str, Any] = {
            "mesh": device_mesh["replica", "shard"] if is_hybrid else device_mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=get_working_dtype(precision), reduce_dtype=get_sum_dtype(precision), cast_forward_inputs=False
            ),
            "reshard_after_forward": False if keep_gathered else None,
        }
        if config.topology.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device_mesh.device_type != "cpu")
        for stage in stages:
            blocks = [block for block in stage.blocks if next(block.parameters(), None) is not None]
            for module in (*blocks, stage):
                materialize(module)
                fully_shard(module, **options)
                _set_sum_reduction(module)
        self._sharded_parameters = list(model.parameters())
        self.parameters = [nn.Parameter(_to_local_tensor(parameter)) for parameter in self._sharded_parameters]
        """This rank's shards, in the order of the model's parameters."""

    def finalize_gradients(self) -> None:
        """Move the gradients that fully_shard has summed to the `grad` of this rank's plain tensors."""
        for parameter, local_shard in zip(self._sharded_parameters, self.parameters, strict=True):
            local_shard.grad = None if parameter.grad is None else _to_local_tensor(parameter.grad)
            parameter.grad = None


class FsdpModel:
    """A model sharded by `fully_shard` over the ranks of the shard dimension."""

    def __init__(self, model: Transformer, config: Config, mesh: Mesh, materialize: Materializer) -> None:
        self._model, self._reduce_every_micro_batch = model, reduces_every_micro_batch(config)
        self._keep_gathered = config.topology.data_parallel_type is DataParallelType.ddp
        """True if parameters are gathered once per step and kept until its end: only the optimizer state is sharded (ZeRO-1)."""
        self.micro_batches_per_step = max(mesh.micro_batches_per_replica)
        """Number of micro batches that every rank runs in a step. Ranks with fewer run empty ones: each pass needs all ranks' shards."""
        self._fsdp_parameters = FsdpParameters(model, [model], config, mesh, materialize, keep_gathered=self._keep_gathered)
        register_fsdp_forward_method(model, "compute_next_token_logits")

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch, as a tensor for the backward pass (see Transformer.forward)."""
        loss: Tensor = self._model(tokens, targets, documents)
        return loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's shards as plain tensors, in the order of the model's parameters."""
        return self._fsdp_parameters.parameters

    @contextmanager
    def accumulate_micro_batch_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Context manager for the forward and backward pass of one micro batch.

        After the last micro batch of a step, gradients are this rank's shards of the sums over all micro batches of all replicas.
        """
        model = _cast_to_fsdp_module(self._model)
        model.set_requires_gradient_sync(is_last or self._reduce_every_micro_batch)
        model.set_requires_all_reduce(is_last)
        if self._keep_gathered:
            model.set_reshard_after_backward(is_last)
        yield
        if is_last:
            self._fsdp_parameters.finalize_gradients()

    def free_gathered_parameters(self) -> None:
        """Free gathered parameters, after the shards were changed: those of the outermost module remain after a pass without gradients."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def reduces_every_micro_batch(config: Config) -> bool:
    """Return whether gradients are reduced after each micro batch, so that their sums are sharded."""
    topology = config.topology
    if topology.reduce_every_micro_batch is not None:
        return topology.reduce_every_micro_batch
    return topology.data_parallel_type is not DataParallelType.ddp and topology.pipeline_parallel_size == 1


def _to_local_tensor(dtensor: Tensor) -> Tensor:
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"expected a DTensor after fully_shard, but got {type(dtensor).__name__}")
    local_shard: Tensor = dtensor.to_local().detach()
    return local_shard


def _set_sum_reduction(module: nn.Module) -> None:
    fsdp_module = _cast_to_fsdp_module(module)
    fsdp_module.set_gradient_divide_factor(1.0)
    fsdp_module.set_force_sum_reduction_for_comms(True)  # otherwise a factor of 1 becomes a reduce operation that gloo lacks


def _cast_to_fsdp_module(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not an FSDPModule: fully_shard was not applied to it")
    return module
