"""Dropout that gives the same result in every topology.

Whether an element is dropped is a function of the seed, the step, the sample's index in the step, the module's name, the token's
position and the index of the dimension; it does not depend on the state of a random number generator. So a rank with half of a sequence,
or a pipeline stage with the last layers, drops the same elements as a single process would. A layer that is recomputed in the backward
pass drops the same elements as in the forward pass, and a GPU drops the same as a CPU.

The hash function is the 32-bit finalizer of MurmurHash3 (Appleby 2011), applied once per token and once per element.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from swarmtrain.trainer.random_seeds import derive_seed

_MURMUR_MULTIPLIERS = -0x7A143595, -0x3D4D51CB
"""The multipliers 0x85EBCA6B and 0xC2B2AE35 of MurmurHash3's finalizer, as signed integers."""
_GOLDEN_RATIO = -0x61C88647
"""0x9E3779B9, the golden ratio in 32 bits: multiples of it are far apart after mixing."""
_INT31_RANGE = 1 << 31
_SEED_AND_FIRST_SAMPLE: ContextVar[tuple[int, int]] = ContextVar("seed, and the number of the first sample", default=(0, 0))


@contextmanager
def seed_dropout(seed: int, first_sample: int) -> Iterator[None]:
    """Context manager for a forward pass: set the seed of its dropout, and the index of its first sample in the step.

    `seed` is derived from the step; the samples of the pass have the indices `first_sample`, `first_sample` + 1, …
    """
    reset_token = _SEED_AND_FIRST_SAMPLE.set((seed, first_sample))
    try:
        yield
    finally:
        _SEED_AND_FIRST_SAMPLE.reset(reset_token)


def compute_token_noise(batch_size: int, positions: Tensor) -> Tensor:
    """Return the dropout noise of the current forward pass (see `seed_dropout`): one int32 per token (batch, sequence).

    `positions`: positions of the tokens in their samples.
    """
    seed, first_sample = _SEED_AND_FIRST_SAMPLE.get()
    tokens = positions.to(torch.int32) * _GOLDEN_RATIO + seed % _INT31_RANGE
    samples = (
        torch.arange(first_sample, first_sample + batch_size, dtype=torch.int32, device=positions.device) * _GOLDEN_RATIO
        + seed // _INT31_RANGE % _INT31_RANGE
    )
    return _mix_bits(_mix_bits(tokens) + _mix_bits(samples)[:, None])


class Dropout(nn.Module):
    """Zeroes random elements of its input and scales the rest, so that the expected value is unchanged. Active in training only."""

    key: Tensor
    """Hash of the module name. It is a tensor rather than an integer, so that all layers share one compiled graph."""

    def __init__(self, probability: float, module_name: str) -> None:
        """Create dropout with `probability`. Modules with the same `module_name` drop the same elements."""
        super().__init__()
        self.probability = probability
        self.first_dimension = 0
        """Offset of this rank's shard in the last dimension of the full input; 0 if the input is not tensor-parallel."""
        key = torch.tensor(
            derive_seed("dropout", module_name) % _INT31_RANGE, dtype=torch.int32, device="cpu"
        )  # the enclosing model is built on the meta device
        self.register_buffer("key", key, persistent=False)
        self._keep_threshold = min(round((1 - probability) * 2 * _INT31_RANGE), 2 * _INT31_RANGE - 1) - _INT31_RANGE

    def forward(self, hidden: Tensor, noise: Tensor | None) -> Tensor:
        """Return `hidden` (batch, sequence, dimension) with dropout applied.

        `noise` (batch, sequence) is from `compute_token_noise`; None: no dropout.
        """
        if not self.probability or not self.training or noise is None:
            return hidden
        dimensions = (
            torch.arange(self.first_dimension, self.first_dimension + hidden.shape[-1], dtype=torch.int32, device=hidden.device)
            * _GOLDEN_RATIO
        )
        words = _mix_bits(_mix_bits(noise + self.key)[..., None] + dimensions)
        return torch.where(words < self._keep_threshold, hidden / (1 - self.probability), 0)


def _mix_bits(words: Tensor) -> Tensor:
    """Return a hash of each 32-bit word: every bit depends on every input bit. Right shifts are logical, products wrap around."""
    first_multiplier, second_multiplier = _MURMUR_MULTIPLIERS
    words = (words ^ (words >> 16 & 0xFFFF)) * first_multiplier
    words = (words ^ (words >> 13 & 0x7FFFF)) * second_multiplier
    return words ^ (words >> 16 & 0xFFFF)
