"""`trainer.preference_config`: learning from pairs of answers."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.base import Section


class PreferenceConfig(Section):
    """DPO: of two answers the one is to become likelier and the other less so, each in terms of what it was before."""

    beta: float = Field(0.1, gt=0, description="How much the answers' likelihoods count: less lets the model go further from what it was.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="Part of the pairs that is believed to be the wrong way round.")
