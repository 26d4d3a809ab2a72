"""Notices gradients that a script has accumulated over several batches and not used yet: no checkpoint has them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_USED_VERSION = "swarmtrain_used_version"
"""Attribute of a gradient: the version that its last optimizer step has used. A tensor's version counts its changes in place."""


class GradientAccumulation:
    """Whether the optimizers of a script have gradients that no optimizer step has used."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Record from now on when one of `optimizers` makes a step."""
        self._optimizers = list(optimizers)
        self._used_in_step: set[int] = set()
        for number, optimizer in enumerate(self._optimizers):
            optimizer.register_step_post_hook(lambda *_, number=number: self._record_optimizer_step(number))

    def start_step(self) -> None:
        """Record that the next batch is about to be processed."""
        self._used_in_step.clear()

    def has_unused_gradients(self) -> bool:
        """Return whether an optimizer that made no step with this batch has gradients that are new since its last step, and not zero."""
        return any(self._has_unused_gradients(number) for number in range(len(self._optimizers)) if number not in self._used_in_step)

    def _has_unused_gradients(self, number: int) -> bool:
        new = [gradient for gradient in self._list_gradients(number) if getattr(gradient, _USED_VERSION, None) != gradient._version]
        return any(bool(gradient.count_nonzero()) for gradient in new)

    def _record_optimizer_step(self, number: int) -> None:
        self._used_in_step.add(number)
        for gradient in self._list_gradients(number):
            setattr(gradient, _USED_VERSION, gradient._version)

    def _list_gradients(self, number: int) -> list[torch.Tensor]:
        parameters = (parameter for group in self._optimizers[number].param_groups for parameter in group["params"])
        return [parameter.grad for parameter in parameters if parameter.grad is not None]
