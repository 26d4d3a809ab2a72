"""What a run keeps in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from swarmtrain.trainer.checkpoint.manifest import BASE

if TYPE_CHECKING:
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
    apart: bool = False
    """Save what is trained, and of the rest only which model it is."""

    @property
    def topology(self) -> Mapping[str, int]:
        mesh = self.model.mesh
        return {"data_parallel_size": mesh.data_size, "model_parallel_size": mesh.tensor_size, "pipe_parallel_size": mesh.pipe_size}

    def tensors(self) -> dict[str, Tensor]:
        frozen = {f"model/{name}" for name in self.frozen} if self.apart else set()
        return {name: tensor for name, tensor in self.everything().items() if name not in frozen}

    @property
    def frozen(self) -> set[str]:
        """The parameters that stay as they are."""
        return set(self.model.names) - set(self.model.trained)

    def everything(self) -> dict[str, Tensor]:
        """Return what `tensors` does, and what is not saved."""
        shards = self.model.shards
        whole = {f"model/{name}": shards.whole(name, parameter.detach()) for name, parameter in self.model.parameters.items()}
        for key, tensor in self.optimizer.moments().items():
            whole[f"optimizer/{key}"] = shards.whole(key.partition("/")[2], tensor)
        return whole

    def state(self) -> dict[str, Any]:
        return {BASE: self.model.base} if self.apart else {}
