"""A loss of pairs of answers: direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290).

Samples come in pairs, the better answer before the worse. Each is seen twice in one pass: with what stands beside the model, and
without, which is the model that it is compared with. So there is no second model, and nothing that divides this one is any wiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from swarmtrain.config.preference import PreferenceConfig
from swarmtrain.trainer.model.adapter import Adapters
from swarmtrain.trainer.model.lora import Beside
from swarmtrain.trainer.model.targets import IGNORE

T = TypeVar("T", Tensor, None)


class Preference:
    """The loss of pairs, and how many were judged right since that was last asked for."""

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config
        self._right: Tensor | None = None

    def loss(self, losses: Tensor, targets: Tensor) -> Tensor:
        """Return the summed loss of pairs, in nats. A pair of which nothing counts has none.

        `losses`: of each token, of the tuned model and then of the other; `targets` (answers, sequence), of pairs one after the other.
        """
        told = -losses.view(2, -1, 2, targets.shape[1]).sum(-1)
        gained = told[0] - told[1].detach()
        margins = self._config.beta * (gained[:, 0] - gained[:, 1])
        smooth = self._config.label_smoothing
        found = -(1 - smooth) * logsigmoid(margins) - smooth * logsigmoid(-margins)
        counts = (targets != IGNORE).view(-1, 2 * targets.shape[1]).any(1)
        right = (counts & (margins > 0)).sum()
        self._right = right if self._right is None else self._right + right
        return torch.where(counts, found, 0).sum()

    def taken(self) -> Tensor | None:
        """Return the number of pairs whose better answer has become the likelier, since the last call; None if there was no pair."""
        right, self._right = self._right, None
        return right


def learn(model: nn.Module) -> None:
    """Let what stands beside `model` count for the first half of each batch alone."""
    for module in _beside(model):
        module.halved = True


@contextmanager
def all_tuned(model: nn.Module) -> Iterator[None]:
    """In the body what stands beside `model` counts for all of a batch."""
    halved = [module for module in _beside(model) if module.halved]
    for module in halved:
        module.halved = False
    try:
        yield
    finally:
        for module in halved:
            module.halved = True


def twice(tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a batch twice over. What a pipeline's stage before has made of `tokens` has been doubled there."""
    doubled = tokens.repeat(2, 1) if tokens.dim() == 2 else tokens
    return doubled, None if documents is None else documents.repeat(2, 1)


def _beside(model: nn.Module) -> Iterator[Beside | Adapters]:
    return (module for module in model.modules() if isinstance(module, Beside | Adapters))
