"""Cross-entropy over a vocabulary that is divided over ranks, without ever gathering the logits.

torch's own (loss_parallel) holds only inside a context that must also be around the backward pass, which here is the
caller's; and it takes three exchanges where two will do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swarmtrain.trainer.model.targets import IGNORE


class VocabularyParallelLoss(nn.Module):
    """Each token's loss in nats, the same on all ranks of `group`, each of which has an equal part of the logits."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = _CrossEntropy.apply(logits, targets, self._group)  # type: ignore[no-untyped-call]  # torch's own is not typed
        return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        """`logits` (tokens, part of the vocabulary), `targets` (tokens)."""
        largest = logits.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest[:, None]
        rows, columns = torch.arange(len(targets), device=targets.device), targets - dist.get_rank(group) * logits.shape[1]
        here = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(here, columns, 0)
        wanted = torch.where(here, shifted[rows, columns], 0)
        weights = shifted.exp_()
        sums = torch.stack((weights.sum(1), wanted))
        dist.all_reduce(sums, group=group)
        counts = targets != IGNORE
        ctx.save_for_backward(weights.div_(sums[0][:, None]), rows, columns, here, counts)
        return torch.where(counts, sums[0].log() - sums[1], 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        probabilities, rows, columns, here, counts = ctx.saved_tensors
        gradients = torch.where(counts[:, None], probabilities, 0)
        gradients[rows, columns] -= here.to(gradients.dtype)
        return gradients.mul_(gradient[:, None]), None, None
