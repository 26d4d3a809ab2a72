"""The state of one learner on this rank: its parameters, its inner optimizer, and the gradients of its prepared step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from swarmtrain.trainer.optim import Optimizer

PARAMETERS, _IN_FLIGHT = "parameters", "in_flight"
"""Names of a learner's parameters, and of its pseudo-gradients that are being exchanged, among the tensors of its state."""


class Learner:
    """One learner. It computes with the model's parameters, whose memory is the learner's while a `use_parameters` block runs."""

    def __init__(self, index: int, inner_optimizer: Optimizer, *, overlaps: bool) -> None:
        """`index`: index of the learner among all learners. `inner_optimizer`: its own optimizer, for the parameters of the model.

        `overlaps`: whether it trains while its pseudo-gradients are exchanged, so that these are part of its state.
        """
        self.index, self.inner_optimizer = index, inner_optimizer
        self.parameters = {name: torch.empty_like(parameter.data) for name, parameter in inner_optimizer.parameters.items()}
        """The learner's values of the trained parameters, by name."""
        self.in_flight = {name: torch.zeros_like(tensor) for name, tensor in self.parameters.items()} if overlaps else {}
        """Pseudo-gradients when their exchange started, by parameter name; outdated for the parameters whose exchange has ended."""
        self._gradients: dict[str, Tensor | None] = {}

    @contextmanager
    def use_parameters(self) -> Iterator[None]:
        """Context manager: within it, the parameters of the model are those of this learner."""
        model_parameters = self.inner_optimizer.parameters
        previous = {name: parameter.data for name, parameter in model_parameters.items()}
        _set_memory(model_parameters, self.parameters)
        try:
            yield
        finally:
            _set_memory(model_parameters, previous)

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


def _set_memory(parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]) -> None:
    """Let each of `parameters` use the memory of the tensor with its name. Autograd and DDP still know it as the same parameter."""
    for name, parameter in parameters.items():
        parameter.data = tensors[name]
    torch.autograd.graph.increment_version(list(parameters.values()))  # the working weights are cast from the new values
