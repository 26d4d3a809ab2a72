"""What a run keeps in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel


class Held(Protocol):
    """What is saved, as it is at the moment."""

    @property
    def topology(self) -> Mapping[str, int]:
        """How it is divided among ranks."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors, as whole (distributed) ones that share memory with what trains."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what is no tensor, as JSON has it."""
        ...


@dataclass(frozen=True)
class Trained:
    """A model and its optimizer."""

    model: ParallelModel
    optimizer: Optimizer

    @property
    def topology(self) -> Mapping[str, int]:
        mesh = self.model.mesh
        return {"data_parallel_size": mesh.data_size, "model_parallel_size": mesh.tensor_size, "pipe_parallel_size": mesh.pipe_size}

    def tensors(self) -> dict[str, Tensor]:
        shards = self.model.shards
        whole = {f"model/{name}": shards.whole(name, parameter.detach()) for name, parameter in self.model.parameters.items()}
        for key, tensor in self.optimizer.moments().items():
            whole[f"optimizer/{key}"] = shards.whole(key.partition("/")[2], tensor)
        return whole

    def state(self) -> dict[str, Any]:
        return {}
