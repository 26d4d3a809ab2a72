"""The state of one learner on this rank: its parameters, its inner optimizer, and the gradients of its prepared step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel.fsdp import FsdpModel

PARAMETERS, _IN_FLIGHT = "parameters", "in_flight"
"""Names of a learner's parameters, and of its pseudo-gradients that are being exchanged, among the tensors of its state."""


class Learner:
    """One learner. It computes with the model's parameters, which have the learner's values while a `use_parameters` block runs."""

    def __init__(self, index: int, inner_optimizer: Optimizer, *, overlaps: bool, sharded_model: FsdpModel | None = None) -> None:
        """`index`: index of the learner among all learners. `inner_optimizer`: its own optimizer, for the parameters of the model.

        `overlaps`: whether it trains while its pseudo-gradients are exchanged, so that these are part of its state. `sharded_model`: the
        model, if fully_shard shards it: the memory of its parameters is then part of a buffer, and only values can be swapped.
        """
        self.index, self.inner_optimizer = index, inner_optimizer
        self._sharded_model = sharded_model
        self.parameters = {name: torch.empty_like(parameter.data) for name, parameter in inner_optimizer.parameters.items()}
        """The learner's values of the trained parameters, by name."""
        self.in_flight = {name: torch.zeros_like(tensor) for name, tensor in self.parameters.items()} if overlaps else {}
        """Pseudo-gradients when their exchange started, by parameter name; outdated for the parameters whose exchange has ended."""
        self._gradients: dict[str, Tensor | None] = {}

    @contextmanager
    def use_parameters(self) -> Iterator[None]:
        """Context manager: within it, the parameters of the model are those of this learner, and `parameters` has the global ones."""
        self._swap_parameters()
        try:
            yield
        finally:
            self._swap_parameters()

    def _swap_parameters(self) -> None:
        if self._sharded_model:
            _swap_values(self.inner_optimizer.parameters, self.parameters)
            self._sharded_model.free_gathered_parameters()
        else:
            _swap_memory(self.inner_optimizer.parameters, self.parameters)

    def take_gradients(self) -> None:
        """Move the gradients of the model's parameters to this learner, so that another learner can compute its own."""
        self._gradients = {name: parameter.grad for name, parameter in self.inner_optimizer.parameters.items()}
        for parameter in self.inner_optimizer.parameters.values():
            parameter.grad = None

    def step(self, number: int) -> None:
        """Run step `number` of the inner optimizer, which must be prepared, with the gradients that were taken."""
        with self.use_parameters():
            for name, parameter in self.inner_optimizer.parameters.items():
                parameter.grad = self._gradients[name]
            self._gradients = {}
            self.inner_optimizer.step(number)

    @torch.no_grad()
    def compute_pseudo_gradients(self, global_parameters: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
        """Return the global parameters minus those of this learner, for the parameters `names`."""
        return {name: global_parameters[name] - self.parameters[name] for name in names}

    @torch.no_grad()
    def approach(self, global_parameters: Mapping[str, Tensor], mixing: float = 0.0) -> None:
        """Set the parameters of this learner that `global_parameters` has to mixing x their value + (1 - mixing) x the global value."""
        for name, parameter in global_parameters.items():
            if mixing:
                self.parameters[name].lerp_(parameter, 1 - mixing)
            else:
                self.parameters[name].copy_(parameter)

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of this learner, named learnerINDEX.KIND/PARAMETER. They are not copies."""
        tensors = {f"{PARAMETERS}/{name}": tensor for name, tensor in self.parameters.items()}
        tensors |= {f"{_IN_FLIGHT}/{name}": tensor for name, tensor in self.in_flight.items()}
        return {f"{self.name_prefix}{name}": tensor for name, tensor in {**tensors, **self.inner_optimizer.collect_state_tensors()}.items()}

    @property
    def name_prefix(self) -> str:
        """Prefix of the names of this learner's state tensors."""
        return f"learner{self.index}."


def _swap_memory(parameters: Mapping[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    """Swap the memory of each of `parameters` and the tensor with its name. Autograd and DDP still know it as the same parameter."""
    for name, parameter in parameters.items():
        parameter.data, tensors[name] = tensors[name], parameter.data
    torch.autograd.graph.increment_version(list(parameters.values()))  # the working weights are cast from the new values


@torch.no_grad()
def _swap_values(parameters: Mapping[str, nn.Parameter], tensors: dict[str, Tensor]) -> None:
    """Swap the values of each of `parameters` and the tensor with its name."""
    for name, parameter in parameters.items():
        previous = parameter.clone()
        parameter.copy_(tensors[name])
        tensors[name].copy_(previous)
