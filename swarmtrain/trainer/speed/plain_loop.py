"""A step as a short loop of plain PyTorch runs it, to compare the trainer with: fused AdamW, gradient clipping, DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swarmtrain.config import Config
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.trainer.model.transformer import Transformer

_LEARNING_RATE, _BETAS, _CLIPPING = 1e-3, (0.9, 0.95), 1.0


def build_plain_step(config: Config, device: torch.device, load_batch: Callable[[], Tensor]) -> Callable[[], float]:
    """Return a function that trains the model of `config` for one step, and returns the loss. With a process group, it is collective.

    `load_batch` returns this rank's tokens, as int64 of shape (samples, sequence_length + 1).
    """
    model: nn.Module = Transformer(config.transformer_architecture, config.trainer.seed).init_weights(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=_BETAS, fused=True)
    uses_autocast = config.transformer_architecture.precision is Precision.bfloat16

    def run_step() -> float:
        batch = load_batch().to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=uses_autocast):
            loss: Tensor = model(batch[:, :-1], batch[:, 1:]) / batch[:, 1:].numel()
        loss.backward()  # type: ignore[no-untyped-call]  # not typed in torch
        nn.utils.clip_grad_norm_(model.parameters(), _CLIPPING)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return run_step
