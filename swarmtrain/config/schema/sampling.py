"""`trainer.sampling_config`: generate text from fixed prompts during training."""

from __future__ import annotations

from pydantic import Field

from swarmtrain.config.schema.base import Section


class SamplingConfig(Section):
    """Prompts that the model completes at intervals during training."""

    prompts: tuple[str, ...] = Field(min_length=1, description="Prompts to complete.")
    interval: int = Field(500, ge=1, description="Steps between generations. Text is also generated after the last step.")
    max_tokens: int = Field(64, ge=1, description="Maximum number of generated tokens per prompt.")
    temperature: float = Field(
        0.8, ge=0, description="Sampling temperature. Above 1: more random; below 1: less random; 0: greedy decoding."
    )
    top_k: int = Field(0, ge=0, description="Sample from the k most likely tokens only. 0: from all tokens.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling: sample from the most likely tokens with this cumulative probability. 1: from all tokens.",
    )
    tokenizer: str | None = Field(
        None,
        description="Path of a tokenizer.json that every node can read, or bytes. null: the tokenizer recorded with "
        "data.data_prefixes, else bytes if vocab_size allows only these.",
    )
