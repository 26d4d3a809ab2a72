"""Choice of the attention methods of a forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from swarmtrain.config.schema.trainer import AttentionKernel
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model.attention.attention_method import AttentionMethod, AttentionProblem
from swarmtrain.trainer.model.attention.dense import CausalAttention, DenseAttention
from swarmtrain.trainer.model.attention.flex import FlexAttention
from swarmtrain.trainer.model.attention.varlen import VarlenAttention
from swarmtrain.trainer.model.attention.visibility import Visibility

_METHODS: Mapping[AttentionKernel, tuple[type[AttentionMethod], ...]] = {
    AttentionKernel.auto: (CausalAttention, VarlenAttention, DenseAttention),
    AttentionKernel.flex: (CausalAttention, FlexAttention, DenseAttention),
    AttentionKernel.dense: (CausalAttention, DenseAttention),
}
"""The methods to choose from: the first one that supports a problem solves it."""


class AttentionMethods(NamedTuple):
    """The attention methods of one forward pass, for heads with full attention and for heads with local attention."""

    full: AttentionMethod
    """Method for heads that attend to all earlier tokens; that for local heads if there are no others."""
    local: AttentionMethod
    """Method for heads that attend to a local (sliding) window; that for the other heads if there are none."""


def build_attention_methods(
    architecture: TransformerArchitectureConfig,
    visibility: Visibility,
    dtype: torch.dtype,
    kernel: AttentionKernel = AttentionKernel.auto,
    *,
    device_type: str | None = None,
) -> AttentionMethods:
    """Return the attention methods of one forward pass.

    `visibility`: of heads with full attention. `dtype`: data type of queries, keys and values. `device_type`: use the kernels for this type
    of device, such as "cuda"; default: that of the device in `visibility`.
    """

    def build_method(visibility: Visibility) -> AttentionMethod:
        problem = AttentionProblem(visibility, architecture, dtype, device_type or visibility.device.type)
        return next(method for method in _METHODS[kernel] if method.supports(problem)).from_problem(problem)

    window_size = architecture.local_attention_window_size
    if window_size is None:
        return AttentionMethods(*[build_method(visibility)] * 2)
    local = build_method(replace(visibility, window_size=window_size))
    return AttentionMethods(build_method(visibility) if architecture.has_full_attention else local, local)
