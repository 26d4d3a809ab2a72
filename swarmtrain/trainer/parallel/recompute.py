"""Activation checkpointing: what a forward pass leaves for the backward pass, and what that computes again instead.

By torch.utils.checkpoint, which puts random numbers and autocast back to what they were. It goes around a module's own
forward method and not around the module: so names stay what they are, and the hooks of fully_shard are not called again.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import partial, wraps
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from swarmtrain.config.topology import ActivationCheckpointing
from swarmtrain.trainer.model.transformer import Transformer

_aten = torch.ops.aten
_PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten.baddbmm.default,
        _aten._scaled_mm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operations whose results are dearer to make than to keep."""


def layers(model: Transformer, kind: ActivationCheckpointing) -> None:
    """Let each layer of `model` keep only what `kind` says."""
    # torch's own default for context_fn is not named: torch.compile knows it only where nobody does.
    options: dict[str, Any] = {}
    if kind is ActivationCheckpointing.selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    if kind in (ActivationCheckpointing.every_layer, ActivationCheckpointing.selective):
        for block in model.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


def stage(part: Transformer, kind: ActivationCheckpointing) -> None:
    """Let `part`, a stage of a pipeline, keep only what goes in, if `kind` says so."""
    if kind is not ActivationCheckpointing.every_pipe_stage:
        return
    passes = part.forward

    @wraps(passes)
    def forward(*args: Any, **options: Any) -> Any:
        # The backward pass may come when what was set for the micro batch is no longer, or in a thread that never knew.
        around = copy_context()
        # To the end, also where all that is needed is there before: what fully_shard does after a block must be done.
        with set_checkpoint_early_stop(False):
            return checkpoint(lambda *given, **named: around.run(passes, *given, **named), *args, use_reentrant=False, **options)

    part.forward = forward  # type: ignore[method-assign]  # what it computes, with the hooks around it left as they are


def _policy(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
