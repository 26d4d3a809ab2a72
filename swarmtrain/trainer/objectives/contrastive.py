"""Contrastive loss over all texts of a global batch (InfoNCE: van den Oord et al. 2018, arXiv 1807.03748).

For each query, its positive text should be the most similar of all candidates: the positives and negatives of the whole global batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from swarmtrain.config.schema.objectives import ContrastiveConfig
from swarmtrain.trainer.model.objective import EmbeddingObjective


class ContrastiveObjective(EmbeddingObjective):
    """InfoNCE objective for text embeddings: the loss of a query is the cross-entropy of its scaled similarities to all candidates."""

    loss_unit = "query"
    has_accuracy = True

    def __init__(self, config: ContrastiveConfig) -> None:
        self._config = config

    def compute_sample_losses(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each query in nats, and whether its own positive is the most similar candidate.

        `vectors` (samples, rows per sample, dimensions): for each sample the vectors of the query, its positive, and its negatives.
        """
        # The positives come first, in the order of the queries: the positive of query i is candidate i.
        queries, candidates = vectors[:, 0], vectors[:, 1:].transpose(0, 1).flatten(0, 1)
        if self._config.query_side_only:
            candidates = candidates.detach()
        similarities = self._config.scale * queries @ candidates.T
        positive_indices = torch.arange(len(queries), device=vectors.device)
        return functional.cross_entropy(similarities, positive_indices, reduction="none"), similarities.argmax(1) == positive_indices
