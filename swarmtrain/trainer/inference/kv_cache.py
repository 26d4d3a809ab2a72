"""KV cache: stores the attention keys and values of earlier tokens, so that they are computed only once.

The model uses the cache through the interface for context parallelism: it computes only a part of each sequence, the new tokens, and reads
the keys and values of the other tokens from the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.transformer import Transformer


class CachedPrefix:
    """The cached part of each sequence: its first `cached_length` tokens."""

    size = 1

    def __init__(self) -> None:
        self.cached_length = 0

    def select_ranges(self, length: int) -> tuple[range, ...] | None:
        """Return the positions of the new tokens in sequences of `length` tokens; None if all tokens are new."""
        return (range(self.cached_length, length),) if self.cached_length else None


class _LayerCache:
    """Cached keys and values of one attention layer."""

    def __init__(self, prefix: CachedPrefix, capacity: int) -> None:
        self._prefix, self._capacity = prefix, capacity
        self._buffers: tuple[Tensor, Tensor] | None = None

    def __call__(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        batch, heads, new_length, size = key.shape
        if self._buffers is None:
            self._buffers = key.new_empty(batch, heads, self._capacity, size), value.new_empty(batch, heads, self._capacity, size)
        end = self._prefix.cached_length + new_length
        for buffer, new_values in zip(self._buffers, (key, value), strict=True):
            buffer[:, :, self._prefix.cached_length : end] = new_values
        keys, values = self._buffers
        return keys[:, :, :end], values[:, :, :end]


@contextmanager
def enable_kv_cache(model: Transformer, capacity: int) -> Iterator[CachedPrefix]:
    """Context manager that adds a KV cache to `model`, for up to `capacity` tokens per sequence.

    It yields a CachedPrefix. After each forward pass, the caller sets its `cached_length`.
    """
    previous, prefix = model.sequence_shard, CachedPrefix()
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    model.sequence_shard = prefix
    for layer in layers:
        layer.gather_key_value = _LayerCache(prefix, capacity)
    try:
        yield prefix
    finally:
        model.sequence_shard = previous
        for layer in layers:
            layer.gather_key_value = None
