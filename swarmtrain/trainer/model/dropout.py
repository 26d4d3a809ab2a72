"""Dropout that no topology changes: what is dropped is a function of the seed, the step, the sample's number in it, the
layer, the place there, the token and the dimension, and of nothing that was drawn before.

So a rank that has half of a sequence, or a stage that has the last layers, drops what one process would have dropped, a
layer that is computed anew for its backward pass drops the same, and so does a GPU in place of a CPU. Numbers are mixed
by the finaliser of MurmurHash3 (Appleby 2011) in 32 bits, once for each token and once for each element.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from swarmtrain.trainer.runtime import derived_seed

_MULTIPLIERS = -0x7A143595, -0x3D4D51CB
"""0x85EBCA6B and 0xC2B2AE35, as signed numbers."""
_GOLDEN = -0x61C88647
"""0x9E3779B9, the golden ratio in 32 bits: what is apart by it is far apart after mixing."""
_WORD = 1 << 31
_AT: ContextVar[tuple[int, int]] = ContextVar("seed, and the number of the first sample", default=(0, 0))


@contextmanager
def at(seed: int, first: int) -> Iterator[None]:
    """In the body the samples of a forward pass have the numbers from `first` on, in a step of which `seed` is the seed."""
    before = _AT.set((seed, first))
    try:
        yield
    finally:
        _AT.reset(before)


def noise(batch: int, places: Tensor) -> Tensor:
    """Return a number for each token (batch, sequence) of the forward pass of the moment (see `at`).

    `places` are those of the tokens in their samples.
    """
    seed, first = _AT.get()
    tokens = places.to(torch.int32) * _GOLDEN + seed % _WORD
    samples = torch.arange(first, first + batch, dtype=torch.int32, device=places.device) * _GOLDEN + seed // _WORD % _WORD
    return _mixed(_mixed(tokens) + _mixed(samples)[:, None])


class Dropout(nn.Module):
    """Sets a part of what it is given to zero, and multiplies the rest so that the mean stays. In training only."""

    key: Tensor
    """A tensor, so that all layers are compiled as one."""

    def __init__(self, probability: float, place: str) -> None:
        """`place` is the module's own name: two of one name drop the same."""
        super().__init__()
        self.probability = probability
        self.first = 0
        """The number of the first dimension of what it is given, in the undivided model."""
        key = torch.tensor(derived_seed("dropout", place) % _WORD, dtype=torch.int32, device="cpu")  # the model around it is made on meta
        self.register_buffer("key", key, persistent=False)
        self._kept = min(round((1 - probability) * 2 * _WORD), 2 * _WORD - 1) - _WORD

    def forward(self, hidden: Tensor, numbers: Tensor | None) -> Tensor:
        """`hidden` (batch, sequence, dimension); `numbers` (batch, sequence) as `noise` makes them."""
        if not self.probability or not self.training or numbers is None:
            return hidden
        dimensions = torch.arange(self.first, self.first + hidden.shape[-1], dtype=torch.int32, device=hidden.device) * _GOLDEN
        words = _mixed(_mixed(numbers + self.key)[..., None] + dimensions)
        return torch.where(words < self._kept, hidden / (1 - self.probability), 0)


def _mixed(words: Tensor) -> Tensor:
    """Return 32-bit words of which every bit depends on every bit of `words`. Shifts fill up with zeros, products wrap around."""
    first, second = _MULTIPLIERS
    words = (words ^ (words >> 16 & 0xFFFF)) * first
    words = (words ^ (words >> 13 & 0x7FFFF)) * second
    return words ^ (words >> 16 & 0xFFFF)
