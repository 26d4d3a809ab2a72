"""RMS normalization as one operation each for the forward and the backward pass, as torch computes it on a GPU.

On the CPU, torch composes it of about ten operations each, below the level at which operations can be observed, and keeps three times as
much memory for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_STATISTICS_DTYPE = torch.float32


@torch.library.custom_op("swarmtrain_simulation::rms_norm", mutates_args=())
def _normalize(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("only fake tensors are normalized")


@_normalize.register_fake
def _(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(values.dtype, weight.dtype)
    return torch.empty_like(values, dtype=dtype), values.new_empty((*values.shape[:-1], 1), dtype=_STATISTICS_DTYPE)


@torch.library.custom_op("swarmtrain_simulation::rms_norm_backward", mutates_args=())
def _compute_gradients(gradient: Tensor, values: Tensor, statistics: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("only fake tensors are normalized")


@_compute_gradients.register_fake
def _(gradient: Tensor, values: Tensor, statistics: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(values), torch.empty_like(weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        normalized: Tensor
        normalized, statistics = _normalize(values, weight)
        ctx.save_for_backward(values, statistics, weight)
        return normalized

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        values, statistics, weight = ctx.saved_tensors
        gradients: tuple[Tensor, Tensor] = _compute_gradients(gradient, values, statistics, weight)
        return gradients


@contextmanager
def fuse_rms_norm() -> Iterator[None]:
    """Context manager in which RMS normalization with a weight is one operation. Its results have shapes, but no values.

    It replaces torch's function: a dispatch mode for functions would be suspended in the backward pass, where checkpointing computes layers
    again.
    """
    original = torch.rms_norm

    def normalize(values: Tensor, normalized_shape: list[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        if weight is None:
            return original(values, normalized_shape, weight, eps)
        return _RmsNorm.apply(values, weight)  # type: ignore[no-any-return, no-untyped-call]  # not typed in torch

    torch.rms_norm = normalize  # type: ignore[assignment]  # called with lists of sizes only
    try:
        yield
    finally:
        torch.rms_norm = original
