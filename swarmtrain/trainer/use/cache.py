"""Keys and values of the tokens that a model has seen, so that each is computed once.

To a model it is what ranks that share sequences are: it has a part of each sequence, the tokens that are new, and comes by the
keys and values of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.transformer import Transformer


class Seen:
    """The first `count` tokens of each sequence have been seen."""

    size = 1

    def __init__(self) -> None:
        self.count = 0

    def places(self, length: int, device: torch.device) -> Tensor | None:
        """Return the places of the tokens that are new, in sequences of `length`; None if all are."""
        return torch.arange(self.count, length, device=device) if self.count else None


class _Kept:
    """One layer's keys and values."""

    def __init__(self, seen: Seen, room: int) -> None:
        self._seen, self._room = seen, room
        self._held: tuple[Tensor, Tensor] | None = None

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, new, size = key.shape
        if self._held is None:
            self._held = key.new_empty(batch, heads, self._room, size), value.new_empty(batch, heads, self._room, size)
        end = self._seen.count + new
        for held, given in zip(self._held, (key, value), strict=True):
            held[:, :, self._seen.count : end] = given
        keys, values = self._held
        return keys[:, :, :end], values[:, :, :end]


@contextmanager
def cached(model: Transformer, room: int) -> Iterator[Seen]:
    """Let `model` keep keys and values of up to `room` tokens of each sequence. Whoever calls it counts what it has seen."""
    before, seen = model.context, Seen()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    model.context = seen
    for layer in layers:
        layer.gather = _Kept(seen, room)
    try:
        yield seen
    finally:
        model.context = before
        for layer in layers:
            layer.gather = None
