"""Objectives from outside the package, for trainer.objective_config."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from swarmtrain.trainer import EmbeddingObjective, Objective
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX


class FocalLoss(Objective):
    """Focal loss (Lin et al. 2017, arXiv 1708.02002): tokens that the model predicts well count less."""

    def __init__(self, gamma: float) -> None:
        self._gamma = gamma

    def compute_loss(self, token_losses: Tensor, targets: Tensor) -> Tensor:
        return ((1 - torch.exp(-token_losses)) ** self._gamma * token_losses).sum()


class MeanLogLikelihoodMargin(Objective):
    """A loss over pairs without a reference model (SimPO: Meng et al. 2024, arXiv 2405.14734)."""

    loss_unit = "pair"
    is_sum_over_tokens = False

    def compute_loss(self, token_losses: Tensor, targets: Tensor) -> Tensor:
        counts = (targets != IGNORE_INDEX).sum(1)
        mean_losses = (token_losses.view_as(targets).sum(1) / counts.clamp(min=1)).view(-1, 2)
        valid = counts.view(-1, 2).any(1)
        return torch.where(valid, -functional.logsigmoid(mean_losses[:, 1] - mean_losses[:, 0]), 0).sum()


class SquaredDistance(EmbeddingObjective):
    """The squared distance of each text from its match."""

    loss_unit = "text"

    def compute_sample_losses(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        return (vectors[:, 0] - vectors[:, 1]).square().sum(1), torch.zeros(len(vectors), dtype=torch.bool, device=vectors.device)
