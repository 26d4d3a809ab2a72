"""`trainer.preference_config`: preference tuning (DPO)."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.schema.base import Section


class PreferenceConfig(Section):
    """DPO: raise the likelihood of chosen over rejected responses, both relative to the frozen reference model."""

    beta: float = Field(
        0.1,
        gt=0,
        description="DPO beta: weight of the log-likelihood ratios. A smaller value lets the model move further from the reference model.",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="Assumed fraction of pairs whose chosen and rejected responses are swapped (conservative DPO)."
    )
