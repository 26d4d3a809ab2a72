"""A contrastive loss over all texts of a global batch (InfoNCE: van den Oord et al. 2018, arXiv 1807.03748): of all answers in it,
those that are known to be wrong too, a query's own is to be the likeliest.

However many replicas and micro batches there are, it is of the whole global batch, with the memory of one micro batch: vectors are made
without gradients first, the loss is differentiated by them, and then each micro batch is gone through again with its part of
that (GradCache: Gao et al. 2021, arXiv 2101.06983). So the loss is the same in every topology, as all losses here; the price is a
forward pass more. Dropout is a function of the step and the sample, and drops the same in both passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from swarmtrain.config.contrastive import ContrastiveConfig


@dataclass(frozen=True)
class Contrast:
    """What this replica's part of a global batch has come to."""

    loss: Tensor
    """Sum over its queries, in nats, in float64."""
    right: Tensor
    """The number of its queries whose own answer is the likeliest."""
    pulls: Tensor
    """For each of its vectors the gradient of the loss of all replicas' queries, as large as the vectors."""

    def of(self, micro: int, size: int) -> Tensor:
        """Return those of this replica's micro batch number `micro`, which has so many vectors; zero if it has none."""
        found = self.pulls[micro * size : (micro + 1) * size]
        return found if len(found) else self.pulls.new_zeros(size, 1)


def contrast(mine: Tensor, config: ContrastiveConfig, *, rows: int, first: int, samples: int, group: dist.ProcessGroup) -> Contrast:
    """Compare the vectors of all replicas. Called by one rank of each, those of `group`, together.

    `mine` (this replica's samples x `rows`, dimensions): vectors of length one; of a sample the query's, its answer's, and those of what
    is no answer. This replica has the samples from number `first` on of so many `samples` of the global batch.
    """
    with torch.enable_grad():
        count, width = len(mine) // rows, mine.shape[1]
        every, here = mine.new_zeros((samples, rows, width)), slice(first, first + count)
        every[here] = mine.view(count, rows, width)
        dist.all_reduce(every, group=group)
        every.requires_grad_()
        queries, answers = every[:, 0], every[:, 1:].transpose(0, 1).flatten(0, 1)  # the right ones come first, in the order of queries
        if config.query_side_only:
            answers = answers.detach()
        likely = config.scale * queries @ answers.T
        losses = functional.cross_entropy(likely, torch.arange(samples, device=likely.device), reduction="none")
        (pulls,) = torch.autograd.grad(losses.sum(), every)
    right = (likely.argmax(1) == torch.arange(samples, device=likely.device))[here].sum()
    return Contrast(losses.detach()[here].double().sum(), right, pulls[here].flatten(0, 1))
