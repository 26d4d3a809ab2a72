"""`trainer.sampling_config`: what the model says, while it is trained."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.base import Section


class SamplingConfig(Section):
    """What the model makes of some prompts, now and then."""

    prompts: tuple[str, ...] = Field(min_length=1, description="What it is to go on from.")
    interval: int = Field(500, ge=1, description="Steps between; after the last step too.")
    max_tokens: int = Field(64, ge=1, description="Tokens at most, for each prompt.")
    temperature: float = Field(0.8, ge=0, description="Above 1 more surprising, below less; 0: always the likeliest.")
    top_k: int = Field(0, ge=0, description="Of so many of the likeliest tokens. 0: of all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Of the likeliest tokens that have this much of the probability.")
    tokenizer: str | None = Field(
        None,
        description="A tokenizer.json that every node sees, or bytes. null: what the data was prepared with; bytes, if it may be these.",
    )
