"""`trainer.contrastive_config`: learning which texts belong together."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.base import Section


class ContrastiveConfig(Section):
    """Of all texts of a global batch, a query's own answer is to be the nearest one."""

    scale: float = Field(20.0, gt=0, description="What cosines are multiplied by: the more, the more only the nearest texts count.")
    query_side_only: bool = Field(False, description="Learn from what becomes of queries alone; answers are what they are compared with.")
