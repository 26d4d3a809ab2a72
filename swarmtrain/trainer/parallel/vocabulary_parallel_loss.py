"""Cross-entropy over a vocabulary that is sharded over ranks, without gathering the logits.

torch's loss_parallel is not used: it is a context manager that must also enclose the backward pass, which the caller runs, and it needs
three collectives instead of two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX


class VocabularyParallelLoss(nn.Module):
    """Computes the loss of each token in nats from logits that are sharded evenly over `group`. All its ranks compute the same loss."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = _VocabularyParallelCrossEntropy.apply(logits, targets, self._group)  # type: ignore[no-untyped-call]  # not typed in torch
        return loss


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the loss of each token in nats. `logits` (tokens, vocabulary shard), `targets` (tokens)."""
        max_logits = logits.amax(1)
        dist.all_reduce(max_logits, dist.ReduceOp.MAX, group=group)
        shifted = logits - max_logits[:, None]
        rows, columns = torch.arange(len(targets), device=targets.device), targets - dist.get_rank(group) * logits.shape[1]
        is_local = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(is_local, columns, 0)
        target_logits = torch.where(is_local, shifted[rows, columns], 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(1), target_logits))
        dist.all_reduce(sums, group=group)
        valid = targets != IGNORE_INDEX
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), rows, columns, is_local, valid)
        return torch.where(valid, sums[0].log() - sums[1], 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, rows, columns, is_local, valid = ctx.saved_tensors
        gradients = torch.where(valid[:, None], probabilities, 0)
        gradients[rows, columns] -= is_local.to(gradients.dtype)
        return gradients.mul_(gradient[:, None]), None, None
