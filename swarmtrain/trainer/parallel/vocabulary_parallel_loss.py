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
from swarmtrain.trainer.parallel.differentiable_collectives import RankGroup, reduce_tensor


class VocabularyParallelLoss(nn.Module):
    """Computes the loss of each token in nats from logits that are sharded evenly over `group`. All its ranks compute the same loss."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._group, self._rank = RankGroup.from_process_group(group), dist.get_rank(group)

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        local_targets = targets - self._rank * logits.shape[1]
        loss: Tensor = _VocabularyParallelCrossEntropy.apply(logits, local_targets, targets != IGNORE_INDEX, self._group)  # type: ignore[no-untyped-call]  # not typed in torch
        return loss


class _VocabularyParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, valid: Tensor, group: RankGroup) -> Tensor:
        """Return the loss of each token in nats, 0 if it is not `valid`.

        `logits` (tokens, vocabulary shard), `columns` (tokens): columns of the targets in this rank's shard, if they are in it.
        """
        shifted = logits - reduce_tensor(logits.amax(1), "max", group)[:, None]
        rows = torch.arange(len(columns), device=columns.device)
        is_local = (columns >= 0) & (columns < logits.shape[1])
        columns = torch.where(is_local, columns, 0)
        target_logits = torch.where(is_local, shifted[rows, columns], 0)
        exponentials = shifted.exp_()
        sums = reduce_tensor(torch.stack((exponentials.sum(1), target_logits)), "sum", group)
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), rows, columns, is_local, valid)
        return torch.where(valid, sums[0].log() - sums[1], 0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, rows, columns, is_local, valid = ctx.saved_tensors
        gradients = torch.where(valid[:, None], probabilities, 0)
        gradients[rows, columns] -= is_local.to(gradients.dtype)
        return gradients.mul_(gradient[:, None]), None, None, None
