"""The state that a run saves in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from swarmtrain.trainer.checkpoint.manifest import BASE_KEY

if TYPE_CHECKING:
    from swarmtrain.trainer.optim import Optimizer
    from swarmtrain.trainer.parallel import ParallelModel


class CheckpointState(Protocol):
    """What is saved, in its current state."""

    @property
    def topology(self) -> Mapping[str, int]:
        """How it is divided among ranks."""
        ...

    def collect_tensors(self) -> dict[str, Tensor]:
        """Return all tensors, as full (distributed) tensors that share memory with the training state."""
        ...

    def collect_non_tensor_state(self) -> dict[str, Any]:
        """Return everything that is not a tensor, as JSON values."""
        ...


@dataclass(frozen=True)
class TrainingState:
    """A model and its optimizer."""

    model: ParallelModel
    optimizer: Optimizer
    trainable_only: bool = False
    """Save trainable parameters, and of the frozen ones only the fingerprint of their model."""

    @property
    def topology(self) -> Mapping[str, int]:
        mesh = self.model.mesh
        return {"data_parallel_size": mesh.data_size, "model_parallel_size": mesh.tensor_size, "pipe_parallel_size": mesh.pipe_size}

    def collect_tensors(self) -> dict[str, Tensor]:
        excluded_names = {f"model/{name}" for name in self.frozen_names} if self.trainable_only else set()
        return {name: tensor for name, tensor in self.collect_all_tensors().items() if name not in excluded_names}

    @property
    def frozen_names(self) -> set[str]:
        """The frozen parameters."""
        return set(self.model.parameter_names) - set(self.model.trained_names)

    def collect_all_tensors(self) -> dict[str, Tensor]:
        """Return what `collect_tensors` does, and also what is not saved."""
        shard_layout = self.model.shard_layout
        tensors = {
            f"model/{name}": shard_layout.wrap_as_dtensor(name, parameter.detach()) for name, parameter in self.model.parameters.items()
        }
        for key, tensor in self.optimizer.collect_state_tensors().items():
            tensors[f"optimizer/{key}"] = shard_layout.wrap_as_dtensor(key.partition("/")[2], tensor)
        return tensors

    def collect_non_tensor_state(self) -> dict[str, Any]:
        return {BASE_KEY: self.model.base_fingerprint} if self.trainable_only else {}
