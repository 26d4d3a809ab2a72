"""`trainer.contrastive_config`: contrastive training of text embeddings."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.schema.base import Section


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
