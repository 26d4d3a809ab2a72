"""Next-token prediction."""

from __future__ import annotations

from swarmtrain.trainer.model.objective import Objective


class LanguageModelObjective(Objective):
    """Next-token prediction: the loss is the summed cross-entropy of the tokens."""

    has_perplexity = True
