"""Compilation of transformer blocks, of the output layer and of the loss with torch.compile, in training only.

Each block is compiled separately, not the whole model. Blocks usually have the same structure: one compilation then serves all of them. The
code around the blocks (hooks of fully_shard, pipeline schedules, activation checkpointing) stays the same. Validation
runs in eager mode: another compilation in the middle of a run would take longer than the validation itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.vocabulary_parallel_loss import VocabularyParallelLoss

_GRAPHS_PER_BLOCK = 2
"""Number of compiled graphs per block: one for a full micro batch, and one for an empty micro batch."""


def should_compile(setting: bool | None, device: torch.device, report_warning: Callable[[str], None]) -> bool:
    """Return whether to compile a model on `device`, given trainer.compile: by default on GPUs, if no rank lacks what it needs.

    `report_warning` is called with what is missing. Collective on GPUs: all ranks must compile, or none, since compiled code may run
    collectives in another order.
    """
    if setting is not None or device.type != "cuda":
        return bool(setting)
    try:
        collectives.run_on_all_ranks(lambda: check_compiler(device, "trainer.compile", alternative="false"))
    except TrainingError as error:
        report_warning(f"training is not compiled, and so slower: rank {error.rank} {error.message}; {error.hint}")
        return False
    return True


def compile_model(model: Transformer, device: torch.device) -> None:
    """Wrap each block of `model`, and its output layer with the loss, in torch.compile, which compiles them when they first run.

    Raises TrainingError if this machine has no C++ compiler, or a GPU but no Triton.
    """
    check_compiler(device, "trainer.compile", alternative="false")
    recompile_limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(recompile_limit, _GRAPHS_PER_BLOCK * len(model.blocks))  # for blocks that differ slightly
    for block in model.blocks:
        block.forward = _use_compiled_forward_in_training(torch.compile(block.forward, dynamic=False), block.forward)

    def compute_token_losses(hidden: Tensor, targets: Tensor) -> Tensor:
        # torch's own loss: its kernels are fused with the conversion of the logits, which then need no memory in float32.
        logits: Tensor = model.head(hidden)
        logits = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        if isinstance(model.loss, VocabularyParallelLoss):
            losses: Tensor = model.loss(logits, targets.flatten())
            return losses
        return functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")

    compiled = torch.compile(compute_token_losses, dynamic=False)
    model.compute_token_losses = _use_compiled_forward_in_training(compiled, model.compute_token_losses)  # type: ignore[method-assign]


def _use_compiled_forward_in_training(compiled_forward: Callable[..., Any], eager_forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(eager_forward)
    def forward(*args: Any, **options: Any) -> Any:
        return (compiled_forward if torch.is_grad_enabled() else eager_forward)(*args, **options)

    return forward


def check_compiler(device: torch.device, setting: str, *, alternative: str) -> None:
    """Raise TrainingError if this machine lacks what torch.compile needs.

    `setting`: the config key that needs it. `alternative`: a value of it that does not.
    """
    from torch._inductor import config, cpp_builder, exc
    from torch.utils._triton import has_triton

    if device.type == "cuda" and not has_triton():
        raise TrainingError(
            "needs Triton, which is not installed",
            place=f"config {setting}",
            hint=f"run pip install triton, or set {setting}: {alternative}",
        )
    try:
        compiler = cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        compiler = ""
    if not compiler or shutil.which(compiler) is None:
        tried = ", ".join(str(name) for name in config.cpp.cxx if name)
        raise TrainingError(
            f"needs a C++ compiler, but found none of {tried}",
            place=f"config {setting}",
            hint=f"build the image with swarmtrain image build --base python:3.11-bookworm, or set {setting}: {alternative}",
        )
