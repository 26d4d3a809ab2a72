"""Activation checkpointing: which activations are saved for the backward pass, and which are recomputed.

Uses torch.utils.checkpoint, which restores the RNG state. It wraps a module's forward method, not the module, so parameter
names do not change, and hooks of fully_shard do not run a second time.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.attention.varlen  # registers the operation
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from swarmtrain.config.schema.topology import ActivationCheckpointing
from swarmtrain.trainer.model.transformer import Transformer, TransformerBlock

_aten = torch.ops.aten
_SAVED_OPERATIONS = frozenset(
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
        torch.ops.torch_attn._varlen_attn.default,
    }
)
"""Operations whose results are saved by selective checkpointing, since recomputing them costs more than storing them."""


def checkpoint_layers(model: Transformer, mode: ActivationCheckpointing) -> None:
    """Make each layer of `model` save only the activations that `mode` selects, and recompute the others in the backward pass."""
    # torch.compile supports the default context_fn only if the argument is omitted.
    options: dict[str, Any] = {}
    if mode is ActivationCheckpointing.selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _choose_checkpoint_policy)
    if mode in (ActivationCheckpointing.every_layer, ActivationCheckpointing.selective):
        for block in model.blocks:
            # A block of the reference model has no activations to save.
            name = "compute_hidden" if isinstance(block, TransformerBlock) else "forward"
            setattr(block, name, partial(checkpoint, getattr(block, name), use_reentrant=False, **options))


def checkpoint_stage(stage_model: Transformer, mode: ActivationCheckpointing) -> None:
    """Make the pipeline stage `stage_model` save only its inputs, if `mode` is every_pipe_stage; a no-op for other modes."""
    if mode is not ActivationCheckpointing.every_pipe_stage:
        return
    original_forward = stage_model.forward

    @wraps(original_forward)
    def forward(*args: Any, **options: Any) -> Any:
        # The backward pass may recompute after the micro batch's context variables were reset, or in a thread without them.
        captured_context = copy_context()
        # Recompute to the end, even if all needed tensors are available earlier: fully_shard's hooks after each block must run.
        with set_checkpoint_early_stop(False):
            return checkpoint(
                lambda *inputs, **kwargs: captured_context.run(original_forward, *inputs, **kwargs), *args, use_reentrant=False, **options
            )

    stage_model.forward = forward  # type: ignore[method-assign]  # replaces only the computation; the module's hooks remain


def _choose_checkpoint_policy(_context: Any, operation: Any, *_args: Any, **_options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED_OPERATIONS else CheckpointPolicy.PREFER_RECOMPUTE
