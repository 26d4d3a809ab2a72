"""Compiled blocks: torch.compile on each block's forward pass while it trains.

By block and not as a whole, since blocks are alike: one is compiled and serves for all, and what stands around them, the
hooks of fully_shard, schedules of pipelines and activation checkpointing, stays as it is. Held-out losses are computed
without: another compilation, in the middle of a run, is more than they cost.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from swarmtrain.errors import TrainingError
from swarmtrain.trainer.model.transformer import Transformer

_CODES_A_BLOCK = 2
"""For a full micro batch, and for an empty one."""


def blocks(model: Transformer, device: torch.device) -> None:
    """Compile the blocks of `model` when they are first used. Raises TrainingError if this machine has no compiler."""
    _check_compiler(device)
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _CODES_A_BLOCK * len(model.blocks))  # for blocks that are not quite alike
    for block in model.blocks:
        block.forward = _trained(torch.compile(block.forward, dynamic=False), block.forward)


def _trained(fast: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def forward(*args: Any, **options: Any) -> Any:
        return (fast if torch.is_grad_enabled() else plain)(*args, **options)

    return forward


def _check_compiler(device: torch.device) -> None:
    from torch._inductor import config, cpp_builder, exc
    from torch.utils._triton import has_triton

    if device.type == "cuda" and not has_triton():
        raise TrainingError("there is no Triton here", place="config trainer.compile", hint="pip install triton, or leave it out")
    try:
        compiler = cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        compiler = ""
    if not compiler or shutil.which(compiler) is None:
        tried = ", ".join(str(name) for name in config.cpp.cxx if name)
        raise TrainingError(
            f"needs a C++ compiler, and there is none of {tried}",
            place="config trainer.compile",
            hint="an image whose BASE_IMAGE has one, as python:3.11-bookworm does; or leave trainer.compile out",
        )
