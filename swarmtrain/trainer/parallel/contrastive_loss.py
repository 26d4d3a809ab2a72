"""Contrastive loss over all texts of a global batch (InfoNCE: van den Oord et al. 2018, arXiv 1807.03748).

For each query, its own answer should be the most likely among all answers in the global batch, including the known negatives. The loss
covers the whole global batch, however many replicas and micro batches there are, with the memory of one micro batch: vectors are first
computed without gradients, the loss is differentiated with respect to the vectors, and then each micro batch runs again with its part of
those gradients (GradCache: Gao et al. 2021, arXiv 2101.06983). So the loss is the same in every topology, at the cost of one more forward
pass. Dropout is a function of the step and the sample, so it drops the same elements in both passes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from swarmtrain.config.schema.contrastive import ContrastiveConfig


@dataclass(frozen=True)
class ContrastiveResult:
    """The contrastive loss of this replica's part of a global batch, and the gradients of its vectors."""

    loss: Tensor
    """Loss in nats, summed over this replica's queries, in float64."""
    correct_count: Tensor
    """Number of this replica's queries for which their own answer is the most likely."""
    vector_gradients: Tensor
    """Gradient of the loss over the queries of all replicas with respect to each of this replica's vectors; same shape as the vectors."""

    def select_micro_batch(self, index: int, size: int) -> Tensor:
        """Return the vector gradients of micro batch `index` of this replica, which has `size` vectors.

        Zeros if there is no such micro batch.
        """
        gradients = self.vector_gradients[index * size : (index + 1) * size]
        return gradients if len(gradients) else self.vector_gradients.new_zeros(size, 1)


def compute_contrastive_loss(
    vectors: Tensor, config: ContrastiveConfig, *, rows_per_sample: int, first_sample: int, global_batch_size: int, group: dist.ProcessGroup
) -> ContrastiveResult:
    """Compute the contrastive loss over the vectors of all replicas. Called by the ranks of `group` together, one rank per replica.

    `vectors` (this replica's samples x `rows_per_sample`, dimensions): unit-length vectors; for each sample, those of the query, its
    answer, and its negatives. This replica has the samples from `first_sample` on, of `global_batch_size` samples in total.
    """
    with torch.enable_grad():
        sample_count, width = len(vectors) // rows_per_sample, vectors.shape[1]
        all_vectors, local_slice = (
            vectors.new_zeros((global_batch_size, rows_per_sample, width)),
            slice(first_sample, first_sample + sample_count),
        )
        all_vectors[local_slice] = vectors.view(sample_count, rows_per_sample, width)
        dist.all_reduce(all_vectors, group=group)
        all_vectors.requires_grad_()
        queries, candidates = (
            all_vectors[:, 0],
            all_vectors[:, 1:].transpose(0, 1).flatten(0, 1),
        )  # positives first, in the order of queries
        if config.query_side_only:
            candidates = candidates.detach()
        similarities = config.scale * queries @ candidates.T
        losses = functional.cross_entropy(similarities, torch.arange(global_batch_size, device=similarities.device), reduction="none")
        (vector_gradients,) = torch.autograd.grad(losses.sum(), all_vectors)
    correct_count = (similarities.argmax(1) == torch.arange(global_batch_size, device=similarities.device))[local_slice].sum()
    return ContrastiveResult(losses.detach()[local_slice].double().sum(), correct_count, vector_gradients[local_slice].flatten(0, 1))
