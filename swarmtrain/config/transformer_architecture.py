"""`transformer_architecture`: the shape of the model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from swarmtrain.config.base import Section, check_multiple, wrong
from swarmtrain.config.fp8 import FP8LinearConfig, FP8Scaling

_PAIR = 2
"""Dimensions that a rotation takes."""


class NormType(StrEnum):
    """Kinds of normalisation."""

    layernorm = "layernorm"
    rms = "rms"


class MlpType(StrEnum):
    """Kinds of feed-forward block."""

    default = "default"
    swiglu = "swiglu"


class Activation(StrEnum):
    """What a default feed-forward block does between its two matrices."""

    gelu = "gelu"
    gelu_tanh = "gelu_tanh"


class PositionType(StrEnum):
    """Ways to tell an attention head how far apart two tokens are."""

    none = "none"
    rotary = "rotary"
    rotary_complex = "rotary_complex"


class Precision(StrEnum):
    """Numbers in which matrices are multiplied. Parameters and optimizer state are float32 with the narrow ones too."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class LayerNormConfig(Section):
    """What norms of both types have in common, and the bias that only layernorm has."""

    layernorm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance, or the mean square, before its root is taken.")
    layernorm_bias: bool = Field(False, description="Add a bias; norm_type layernorm only.")


class RotaryScalingConfig(Section):
    """Slower rotations for samples longer than a model began with: those that turn too seldom in the old length to have been learned
    whole are slowed by a factor, those that turn often stay, and in between it is a bit of both (Llama 3.1)."""

    factor: float = Field(8.0, ge=1, description="What slow rotations are slowed by.")
    low_frequency_factor: float = Field(1.0, gt=0, description="Turns in the original length up to which a rotation is slow.")
    high_frequency_factor: float = Field(4.0, gt=0, description="Turns in the original length from which it stays as it is.")
    original_sequence_length: int = Field(8192, ge=1, description="Tokens in a sample of the model before.")

    @model_validator(mode="after")
    def _in_order(self) -> RotaryScalingConfig:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise wrong(
                "high_frequency_factor", f"{self.high_frequency_factor} is not above low_frequency_factor {self.low_frequency_factor}"
            )
        return self


class LoraLayer(StrEnum):
    """Layers of a block that LoRA can stand beside."""

    query = "query"
    key = "key"
    value = "value"
    output = "output"
    gate = "gate"
    up = "up"
    down = "down"


class LoraConfig(Section):
    """LoRA: beside the matrix W of a layer a product B A of two narrow ones, which alone is trained."""

    rank: int = Field(8, ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(16.0, gt=0, description="B A is multiplied by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Part of what A is given that is dropped in training.")
    layers: tuple[LoraLayer, ...] = Field(
        (LoraLayer.query, LoraLayer.value),
        min_length=1,
        strict=False,
        description="Layers: query, key, value and output of attention; gate, up and down of the feed-forward block.",
    )


class AdapterConfig(Section):
    """Adapters: what attention and the feed-forward block make goes through a narrow block of its own, which alone is trained."""

    attention_downsampling_factor: float | None = Field(
        0.25, gt=0, description="Width of the narrow block after attention, in hidden sizes. null: there is none."
    )
    mlp_downsampling_factor: float | None = Field(0.25, gt=0, description="The same after the feed-forward block.")

    @model_validator(mode="after")
    def _there_is_one(self) -> AdapterConfig:
        if self.attention_downsampling_factor is None and self.mlp_downsampling_factor is None:
            raise wrong("mlp_downsampling_factor", "null, and attention_downsampling_factor too: there is nothing to train")
        return self


class Pooling(StrEnum):
    """What one vector is made of a text's tokens."""

    mean = "mean"
    weighted_mean = "weighted_mean"
    last_token = "last_token"  # noqa: S105  # no secret


class EmbeddingHeadConfig(Section):
    """A head that makes one vector, of length one, of each text, in place of the one that makes logits."""

    pooling: Pooling = Field(
        Pooling.weighted_mean,
        description="mean of all its tokens; weighted_mean, in which a token counts by its place, the first one least; last_token alone.",
    )
    proj_layers: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (), description="Widths of linear layers behind it, with a GELU between each two. []: none, the vector is hidden_size wide."
    )


class UmupConfig(Section):
    """u-muP: a parametrization in which the best learning rate of a narrow model is that of a wide one."""

    enable: bool = Field(False, description="Scale operations and learning rates by u-muP. Rates are then near 1, not near 0.001.")
    normalize_depth_to_num_layers: bool = Field(False, description="Take num_layers for the depth, not the two branches of each.")
    attn_mult: float = Field(1.0, gt=0, description="What attention's scores are multiplied by.")
    act_mult: float = Field(1.0, gt=0, description="What goes into the feed-forward block's GELU or SiLU is multiplied by this.")
    residual_mult: float = Field(1.0, gt=0, description="Strength of blocks beside the embedding.")
    residual_attn_ratio: float = Field(1.0, gt=0, description="Strength of attention beside that of the feed-forward block.")
    loss_mult: float = Field(1.0, gt=0, description="What logits are multiplied by.")


class TransformerArchitectureConfig(Section):
    """A decoder-only transformer with causal attention."""

    vocab_size: int = Field(256, ge=2, description="Number of tokens. 256: bytes.")
    hidden_size: int = Field(128, ge=1, description="Width of the residual stream.")
    num_layers: int = Field(4, ge=1, description="Number of blocks.")
    num_attention_heads: int = Field(4, ge=1, description="Heads of attention.")
    attention_num_kv_heads: int | None = Field(
        None, ge=1, description="Heads of keys and values, shared by groups of heads. null: one each."
    )
    attention_head_size: int | None = Field(None, ge=1, description="Dimensions of a head. null: hidden_size / num_attention_heads.")
    sequence_length: int = Field(256, ge=1, description="Tokens in a sample.")
    num_local_attention_heads: int = Field(
        0, ge=0, description="The first so many heads see only the tokens near their own; all others see every token before."
    )
    local_attention_window_size: int | None = Field(
        None, ge=1, description="Tokens before its own that a local head sees. For num_local_attention_heads."
    )
    attention_bias: bool = Field(False, description="Add biases to queries, keys, values and attention's output.")
    attention_output_bias: bool | None = Field(None, description="Whether attention's output has one. null: as attention_bias says.")
    key_query_norm: bool = Field(False, description="Normalise each head's queries and keys, before they are rotated.")
    relative_position_embedding_type: PositionType = Field(
        PositionType.rotary,
        description="rotary: dimension i turns with i + half a head. rotary_complex: with its neighbour. none: positions are not told.",
    )
    rotary_embedding_base: float = Field(10000, ge=1, description="Base of the rotary frequencies.")
    rotary_scaling: RotaryScalingConfig | None = Field(
        None, description="Rotary frequencies for longer samples; {} for Llama 3.1's. null: as they are."
    )
    rotary_percentage: float = Field(1.0, gt=0, le=1, description="Part of each head's dimensions that rotates; the first ones do.")
    learned_positions: bool = Field(False, description="Add a learned vector for its place in the sample to each token's, as GPT-2 does.")
    reset_attention_mask: bool = Field(False, description="Documents packed into one sample do not see each other.")
    reset_position_ids: bool = Field(False, description="Positions begin with 0 in each document of a sample.")
    norm_type: NormType = Field(NormType.layernorm, description="layernorm or rms.")
    mlp_type: MlpType = Field(MlpType.default, description="default (two matrices) or swiglu (three).")
    activation_function: Activation = Field(Activation.gelu, description="Of mlp_type default: gelu, or its approximation by tanh.")
    parallel_residual: bool = Field(False, description="Attention and the feed-forward block of a layer see the same stream, as in GPT-J.")
    layernorm: LayerNormConfig = Field(LayerNormConfig(), description="Of all norms, whichever type they are.")
    mlp_bias: bool = Field(False, description="Add biases to the feed-forward block.")
    mlp_factor: float = Field(4.0, gt=0, description="Width of the feed-forward block, in hidden sizes.")
    weight_tying: bool = Field(True, description="Use the embedding as output layer too.")
    dropout_embedding: float = Field(0.0, ge=0, lt=1, description="Part of the embedding's output that is dropped in training.")
    dropout_attention_probs: float = Field(
        0.0, ge=0, lt=1, description="Part of attention's weights that is dropped. Which ones depends on the topology, here alone."
    )
    dropout_after_attention: float = Field(0.0, ge=0, lt=1, description="Part of attention's output that is dropped.")
    dropout_after_mlp: float = Field(0.0, ge=0, lt=1, description="Part of the feed-forward block's output that is dropped.")
    lora_config: LoraConfig | None = Field(
        None, description="Low-rank matrices beside those of blocks, to fine-tune a model; {} for the usual ones. null: none."
    )
    adapter_config: AdapterConfig | None = Field(
        None,
        description="Narrow blocks behind attention and the feed-forward block, to fine-tune a model; {} for the usual ones. null: none.",
    )
    embedding_head_config: EmbeddingHeadConfig | None = Field(
        None,
        description="Make a vector of each text instead of logits, by trainer.contrastive_config; {} for the usual head. null: logits.",
    )
    umup: UmupConfig = Field(UmupConfig(), description="u-muP; with AdamW alone, without weight_tying and clipping.")
    precision: Precision = Field(Precision.float32, description="float32; bfloat16 or float16 by autocast; float64 to prove things with.")
    fp8_config_attention: FP8LinearConfig | None = Field(
        None, description="Make queries, keys and values by products in float8; {} for the usual ones. null: in precision."
    )
    fp8_config_attention_dense_out: FP8LinearConfig | None = Field(None, description="The same for attention's output.")
    fp8_config_mlp: FP8LinearConfig | None = Field(None, description="The same for what goes into the feed-forward block's GELU or SwiGLU.")
    fp8_config_mlp_dense_out: FP8LinearConfig | None = Field(None, description="The same for the feed-forward block's output.")
    fp8_emulate: bool = Field(
        False, description="Round to float8 and multiply in float32, slowly: to see on any device what float8 does to a model."
    )

    @model_validator(mode="after")
    def _heads_fit(self) -> TransformerArchitectureConfig:
        if self.attention_head_size is None:
            check_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.head_size % 2 and self.rotary_dimensions:
            name = "num_attention_heads" if self.attention_head_size is None else "attention_head_size"
            raise wrong(name, f"rotary positions need an even head size, not {self.head_size}")
        check_multiple("num_attention_heads", self.num_attention_heads, "attention_num_kv_heads", self.kv_heads)
        return self

    @model_validator(mode="after")
    def _rotation_fits(self) -> TransformerArchitectureConfig:
        rotary = self.relative_position_embedding_type is not PositionType.none
        if rotary and (self.rotary_dimensions < _PAIR or self.rotary_dimensions % _PAIR):
            reason = (
                f"{self.rotary_percentage} of a head's {self.head_size} dimensions are {self.rotary_dimensions}, which do not make pairs"
            )
            raise wrong("rotary_percentage", reason, f"{_PAIR * max(1, self.rotary_dimensions // _PAIR) / self.head_size} would fit")
        return self

    @model_validator(mode="after")
    def _window_fits(self) -> TransformerArchitectureConfig:
        local, window = self.num_local_attention_heads, self.local_attention_window_size
        if local and window is None:
            raise wrong("num_local_attention_heads", f"{local} local heads need local_attention_window_size beside them")
        if window is not None and not local:
            raise wrong("local_attention_window_size", "is for local heads, and num_local_attention_heads is 0")
        if local > self.num_attention_heads:
            raise wrong("num_local_attention_heads", f"{local} local heads are more than num_attention_heads {self.num_attention_heads}")
        check_multiple("num_local_attention_heads", local, "heads that share keys,", self.num_attention_heads // self.kv_heads)
        return self

    @model_validator(mode="after")
    def _norm_fits(self) -> TransformerArchitectureConfig:
        if self.layernorm.layernorm_bias and self.norm_type is NormType.rms:
            raise wrong("layernorm.layernorm_bias", "rms norms have no bias", "leave it out, or set norm_type: layernorm")
        return self

    @model_validator(mode="after")
    def _has_its_companion(self) -> TransformerArchitectureConfig:
        if self.activation_function is not Activation.gelu and self.mlp_type is not MlpType.default:
            raise wrong("activation_function", f"is for mlp_type default, and mlp_type is {self.mlp_type}")
        if self.rotary_scaling is not None and self.relative_position_embedding_type is PositionType.none:
            raise wrong("rotary_scaling", "is for rotary positions, and relative_position_embedding_type is none")
        return self

    @model_validator(mode="after")
    def _umup_fits(self) -> TransformerArchitectureConfig:
        for name in ("learned_positions", "parallel_residual", "lora_config", "adapter_config", "embedding_head_config"):
            if self.umup.enable and getattr(self, name):
                raise wrong(name, "has no scales by u-muP", f"leave {name} out, or set umup.enable: false")
        if self.umup.enable and self.weight_tying:
            reason = "u-muP gives the embedding and the output layer other scales, so they cannot be one"
            raise wrong("weight_tying", reason, "set weight_tying: false, or umup.enable: false")
        return self

    @model_validator(mode="after")
    def _lora_fits(self) -> TransformerArchitectureConfig:
        if self.lora_config is None:
            return self
        if LoraLayer.gate in self.lora_config.layers and self.mlp_type is not MlpType.swiglu:
            raise wrong("lora_config.layers", f"mlp_type {self.mlp_type} has no gate", "leave gate out")
        if len(set(self.lora_config.layers)) < len(self.lora_config.layers):
            raise wrong("lora_config.layers", "names a layer twice", "leave one out")
        return self

    @model_validator(mode="after")
    def _float8_fits(self) -> TransformerArchitectureConfig:
        for name, config in self.float8.items():
            if self.precision not in (Precision.bfloat16, Precision.float32):
                raise wrong("precision", f"{self.precision} is not what float8 products come in, and {name} asks for them", "bfloat16")
            if config.scaling is FP8Scaling.rowwise and self.precision is not Precision.bfloat16:
                raise wrong(f"{name}.scaling", "rowwise products come in bfloat16 alone", "precision: bfloat16, or scaling: tensorwise")
        if self.fp8_emulate and not self.float8:
            raise wrong("fp8_emulate", "is for float8 products, and no fp8_config_… asks for them")
        return self

    @property
    def float8(self) -> dict[str, FP8LinearConfig]:
        """The layers that multiply in float8, by the names of their fields."""
        fields = ("fp8_config_attention", "fp8_config_attention_dense_out", "fp8_config_mlp", "fp8_config_mlp_dense_out")
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}

    @property
    def head_size(self) -> int:
        """Dimensions of one head."""
        return self.attention_head_size or self.hidden_size // self.num_attention_heads

    @property
    def attention_width(self) -> int:
        """Dimensions of all heads."""
        return self.num_attention_heads * self.head_size

    @property
    def rotary_dimensions(self) -> int:
        """Dimensions of a head that rotate."""
        return int(self.head_size * self.rotary_percentage) if self.relative_position_embedding_type is not PositionType.none else 0

    @property
    def mlp_width(self) -> int:
        """Width of the feed-forward block."""
        return int(self.hidden_size * self.mlp_factor)

    @property
    def beside(self) -> tuple[str, ...]:
        """The fields that put something beside the model to tune it."""
        return tuple(name for name in ("lora_config", "adapter_config") if getattr(self, name) is not None)

    @property
    def tied(self) -> bool:
        """Whether the embedding is the output layer too."""
        return self.weight_tying and self.embedding_head_config is None

    @property
    def embedding_size(self) -> int | None:
        """Dimensions of a text's vector; None if there are logits."""
        head = self.embedding_head_config
        return (self.hidden_size, *head.proj_layers)[-1] if head else None

    @property
    def drops(self) -> bool:
        """Whether anything but attention's weights is dropped in training."""
        beside = self.lora_config.dropout if self.lora_config else 0.0
        return any((self.dropout_embedding, self.dropout_after_attention, self.dropout_after_mlp, beside))

    @property
    def tells_documents_apart(self) -> bool:
        """Whether the model asks which document of its sample a token belongs to."""
        return self.reset_attention_mask or self.reset_position_ids

    @property
    def output_bias(self) -> bool:
        """Whether attention's output has a bias."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.attention_num_kv_heads or self.num_attention_heads
