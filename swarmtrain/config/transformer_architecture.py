"""`transformer_architecture`: the shape of the model."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, check_multiple, wrong


class NormType(StrEnum):
    """Kinds of normalisation."""

    layernorm = "layernorm"
    rms = "rms"


class MlpType(StrEnum):
    """Kinds of feed-forward block."""

    default = "default"
    swiglu = "swiglu"


class Precision(StrEnum):
    """Numbers in which matrices are multiplied. Parameters and optimizer state are float32 with the narrow ones too."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class TransformerArchitectureConfig(Section):
    """A decoder-only transformer with rotary positions and causal attention."""

    vocab_size: int = Field(256, ge=2, description="Number of tokens. 256: bytes.")
    hidden_size: int = Field(128, ge=1, description="Width of the residual stream.")
    num_layers: int = Field(4, ge=1, description="Number of blocks.")
    num_attention_heads: int = Field(4, ge=1, description="Heads of attention.")
    attention_num_kv_heads: int | None = Field(
        None, ge=1, description="Heads of keys and values, shared by groups of heads. null: one each."
    )
    sequence_length: int = Field(256, ge=1, description="Tokens in a sample.")
    rotary_embedding_base: int = Field(10000, ge=1, description="Base of the rotary frequencies.")
    norm_type: NormType = Field(NormType.layernorm, description="layernorm or rms.")
    mlp_type: MlpType = Field(MlpType.default, description="default (GELU) or swiglu.")
    mlp_factor: float = Field(4.0, gt=0, description="Width of the feed-forward block, in hidden sizes.")
    weight_tying: bool = Field(True, description="Use the embedding as output layer too.")
    precision: Precision = Field(Precision.float32, description="float32; bfloat16 or float16 by autocast; float64 to prove things with.")

    @model_validator(mode="after")
    def _heads_fit(self) -> TransformerArchitectureConfig:
        check_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.hidden_size // self.num_attention_heads % 2:
            raise wrong(
                "num_attention_heads", f"rotary positions need an even head size, not {self.hidden_size // self.num_attention_heads}"
            )
        check_multiple("num_attention_heads", self.num_attention_heads, "attention_num_kv_heads", self.kv_heads)
        return self

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.attention_num_kv_heads or self.num_attention_heads
