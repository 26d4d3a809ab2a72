"""Preference loss over pairs of responses: direct preference optimization (DPO; Rafailov et al. 2023, arXiv 2305.18290).

Samples are ordered in pairs, the preferred response followed by the rejected response. The reference model is the model without LoRA and
adapters, so no second model is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from swarmtrain.config.schema.objectives import PreferenceConfig
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.objective import Objective


class PreferenceObjective(Objective):
    """DPO objective: computes the summed loss of preference pairs, and counts the correctly ranked pairs."""

    loss_unit = "pair"
    has_accuracy = True
    is_sum_over_tokens = False
    has_reference = True

    def __init__(self, config: PreferenceConfig) -> None:
        self._config = config
        self._correct_count: Tensor | None = None

    def compute_loss(self, token_losses: Tensor, targets: Tensor) -> Tensor:
        """Return the DPO loss in nats, summed over all pairs. A pair without loss tokens has a loss of 0.

        `token_losses`: loss of each token, flattened: first of all samples under the policy, then of all samples under the reference
        model. `targets` (responses, sequence): the two responses of a pair are consecutive.
        """
        log_probabilities = -token_losses.view(2, -1, 2, targets.shape[1]).sum(-1)
        log_ratios = log_probabilities[0] - log_probabilities[1]
        margins = self._config.beta * (log_ratios[:, 0] - log_ratios[:, 1])
        label_smoothing = self._config.label_smoothing
        pair_losses = -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)
        valid = (targets != IGNORE_INDEX).view(-1, 2 * targets.shape[1]).any(1)
        correct_count = (valid & (margins > 0)).sum()
        self._correct_count = correct_count if self._correct_count is None else self._correct_count + correct_count
        return torch.where(valid, pair_losses, 0).sum()

    def pop_correct_count(self) -> Tensor | None:
        """Return the number of correctly ranked pairs since the last call, and reset the counter. None if no pair was counted.

        A pair is ranked correctly if the preferred response has gained more likelihood over the reference model than the rejected
        response.
        """
        correct_count, self._correct_count = self._correct_count, None
        return correct_count
