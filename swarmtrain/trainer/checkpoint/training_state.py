"""State that a run saves in its checkpoints: the interface, and the state of a model and its optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor

from swarmtrain.trainer.checkpoint.manifest import BASE_KEY

if TYPE_CHECKING:
    from swarmtrain.trainer.optim import StatefulOptimizer
    from swarmtrain.trainer.parallel import ParallelModel


class CheckpointState(Protocol):
    """Interface of the state that a checkpoint saves."""

    @property
    def topology(self) -> Mapping[str, int]:
        """Degree of each parallel dimension, by name."""
        ...

    def collect_tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name. They share memory with the training state. Sharded tensors are DTensors."""
        ...

    def collect_rank_tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name that only this rank has.

        A checkpoint lacks them if not all ranks write it, or if each node writes it to its own disk.
        """
        ...

    def collect_non_tensor_state(self) -> dict[str, Any]:
        """Return all state that is not a tensor, as JSON values."""
        ...


RANK_STATE_PREFIX = "rank_state/"
"""Prefix of the names that collect_rank_tensors() returns."""


@dataclass(frozen=True)
class TrainingState:
    """State of a model and its optimizer."""

    model: ParallelModel
    optimizer: StatefulOptimizer
    trainable_only: bool = False
    """Whether to save only trainable parameters. For the frozen parameters, the base model's fingerprint is saved."""

    @property
    def topology(self) -> Mapping[str, int]:
        mesh = self.model.mesh
        return {"data_parallel_size": mesh.replica_count, "model_parallel_size": mesh.tensor_size, "pipe_parallel_size": mesh.pipe_size}

    def collect_tensors(self) -> dict[str, Tensor]:
        excluded_names = {f"model/{name}" for name in self.frozen_parameter_names} if self.trainable_only else set()
        return {name: tensor for name, tensor in self.collect_all_tensors().items() if name not in excluded_names}

    @property
    def frozen_parameter_names(self) -> set[str]:
        """Names of the frozen parameters."""
        return set(self.model.parameter_names) - set(self.model.trained_names)

    def collect_all_tensors(self) -> dict[str, Tensor]:
        """Return all tensors of model and optimizer, including the frozen parameters, which `collect_tensors` may exclude."""
        shard_layout = self.model.shard_layout
        tensors = {
            f"model/{name}": shard_layout.wrap_as_dtensor(name, parameter.detach()) for name, parameter in self.model.parameters.items()
        }
        for key, tensor in self.optimizer.collect_state_tensors().items():
            tensors[f"optimizer/{key}"] = shard_layout.wrap_as_dtensor(key.partition("/")[2], tensor)
        return tensors

    def collect_rank_tensors(self) -> dict[str, Tensor]:
        """Return the error feedback of gradient compression, by names that contain the rank and the world size."""
        compressor = self.model.gradient_compressor
        prefix = f"{RANK_STATE_PREFIX}{dist.get_rank()}-of-{dist.get_world_size()}"
        return {f"{prefix}/{name}": tensor for name, tensor in compressor.collect_state_tensors().items()} if compressor else {}

    def collect_non_tensor_state(self) -> dict[str, Any]:
        return {BASE_KEY: self.model.base_fingerprint} if self.trainable_only else {}

    def write_missing_values(self, loaded_names: Collection[str] = ()) -> None:
        """If the model has no values yet, write the initial values of all tensors except `loaded_names`, which a checkpoint has provided.

        The state of gradient compression gets its initial values unless it is loaded. Raises CheckpointError if the values are from files
        that cannot be read.
        """
        if self.model.gradient_compressor and not self.collect_rank_tensors().keys() <= set(loaded_names):
            self.model.gradient_compressor.reset_state()
        if self.model.initial_values.has_missing_values:
            self.optimizer.reset_state({name.removeprefix("optimizer/") for name in loaded_names})
            self.model.initial_values.write_missing_values({name.removeprefix("model/") for name in loaded_names})
