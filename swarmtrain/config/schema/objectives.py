"""`trainer.contrastive_config` and `trainer.preference_config`: settings of the losses other than next-token prediction."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.schema.section import Section


class ContrastiveConfig(Section):
    """In-batch contrastive loss: among all texts of a global batch, a query's positive text should be the nearest."""

    scale: float = Field(
        20.0,
        gt=0,
        description="Multiplier of the cosine similarities (inverse temperature). Larger values concentrate the loss on the nearest texts.",
    )
    query_side_only: bool = Field(
        False, description="Backpropagate through query embeddings only; positive and negative texts are treated as constants."
    )


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
