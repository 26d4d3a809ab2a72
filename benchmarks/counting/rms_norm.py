"""RMS normalization as one operation each for the forward and the backward pass, as torch computes it on a GPU.

On the CPU, torch composes it of about ten operations each, below the level at which operations can be observed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_STATISTICS_DTYPE = torch.float32


@torch.library.custom_op("counting::rms_norm", mutates_args=())
def _normalize(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError("only fake tensors are normalized")


@_normalize.register_fake
def _(values: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(values.dtype, weight.dtype)
    return torch.empty_like(values, dtype=dtype), values.new_empty((*values.shape[:-1], 1), dtype=_STATISTICS_DTYPE)


@torch.library.custom_op("counting::rms_norm_backward", mutates_args=())
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


class RmsNormAsOneOperation(TorchFunctionMode):
    """Mode in which `torch.nn.functional.rms_norm` with a weight is one operation. Its results have shapes, but no values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.nn.functional.rms_norm or function is torch.rms_norm:
            values, _, weight = (*args, kwargs.get("weight"))[:3]
            return _RmsNorm.apply(values, weight)  # type: ignore[no-untyped-call]  # not typed in torch
        return function(*args, **kwargs)
