"""Data parallelism that divides the state: `fully_shard`, one group a block, summing instead of averaging.

Each rank keeps a part of every parameter, its gradient and its optimizer state, and gathers what a block needs when it
needs it. In fp32 gradients are kept in fp64 until they are summed (see data.py), so the losses are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from swarmtrain.config import Config
from swarmtrain.config.topology import DataParallelType
from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.mesh import Mesh

Fill = Callable[[nn.Module], None]
"""Gives a module's parameters their values."""


class Divided:
    """What this rank keeps of a model of which every rank of the shard dimension keeps a part: plain tensors."""

    def __init__(self, model: Transformer, stages: Sequence[Transformer], config: Config, mesh: Mesh, fill: Fill, *, hold: bool) -> None:
        """Divide `model`, in place. `stages` are what passes are made of: the model itself, or views that show parts of it.

        It has no values yet: a block gets its own with `fill` when it is about to be divided, and is never there whole with another.
        `hold`: what a forward pass has gathered stays until a backward pass that says otherwise.
        """
        exact, device_mesh = config.transformer_architecture.precision is Precision.float32, mesh.device_mesh
        # Sums that wait for those over replicas are kept in fp64. What fully_shard sums at once, it keeps as parameters are.
        copies = config.topology.reduce_every_micro_batch or device_mesh["replica"].size() > 1
        options: dict[str, Any] = {
            "mesh": device_mesh["replica", "shard"] if copies else device_mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64 if exact else None),
            "reshard_after_forward": False if hold else None,
        }
        if config.topology.cpu_offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device_mesh.device_type != "cpu")
        for stage in stages:
            blocks = [block for block in stage.blocks if next(block.parameters(), None) is not None]
            for module in (*blocks, stage):
                fill(module)
                fully_shard(module, **options)
                _sum(module)
        self._divided = list(model.parameters())
        self.parameters = [nn.Parameter(_part(parameter)) for parameter in self._divided]
        """This rank's parts, in the order of the model's parameters."""

    def take_gradients(self) -> None:
        """Hand the gradients that fully_shard has summed to the parts."""
        for parameter, part in zip(self._divided, self.parameters, strict=True):
            part.grad = None if parameter.grad is None else _part(parameter.grad)
            parameter.grad = None


class ShardedReplicas:
    """A model of which every rank of the shard dimension keeps a part, as one."""

    def __init__(self, model: Transformer, config: Config, mesh: Mesh, fill: Fill) -> None:
        self._model, self._each = model, config.topology.reduce_every_micro_batch
        self._keep = config.topology.data_parallel_type is DataParallelType.ddp
        """Gather parameters once a step and hold them until its end: only the optimizer's state is to be divided."""
        self.passes = max(mesh.shares)
        """Passes that every rank makes in a step, empty ones too: those of the others need its parts."""
        self._divided = Divided(model, [model], config, mesh, fill, hold=self._keep)
        register_fsdp_forward_method(model, "last")

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch (see Transformer.forward), ready for the backward pass."""
        loss: Tensor = self._model(tokens, targets, documents)
        return loss

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's parts as plain tensors, in the order of the model's parameters."""
        return self._divided.parameters

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward pass of one micro batch go in the body. After a step's last one this rank has its part of the sum of all."""
        model = _sharded(self._model)
        model.set_requires_gradient_sync(last or self._each)
        model.set_requires_all_reduce(last)
        if self._keep:
            model.set_reshard_after_backward(last)
        yield
        if last:
            self._divided.take_gradients()


def _part(divided: Tensor) -> Tensor:
    if not isinstance(divided, DTensor):
        raise TypeError(f"fully_shard left a {type(divided).__name__}")
    part: Tensor = divided.to_local().detach()
    return part


def _sum(module: nn.Module) -> None:
    sharded = _sharded(module)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # else a factor of one becomes an operation that gloo does not have


def _sharded(module: nn.Module) -> FSDPModule:
    if not isinstance(module, FSDPModule):
        raise TypeError(f"{type(module).__name__} is not sharded")
    return module
