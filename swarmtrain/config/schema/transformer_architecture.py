"""`transformer_architecture`: the architecture of the model."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field, model_validator

from swarmtrain.config.schema.fp8 import FP8LinearConfig, FP8Scaling
from swarmtrain.config.schema.section import Section, build_field_error, check_is_multiple

_ROTARY_PAIR = 2
"""Number of dimensions that RoPE rotates together."""


class NormType(StrEnum):
    """Types of normalization layer."""

    layernorm = "layernorm"
    rms = "rms"


class MlpType(StrEnum):
    """Kinds of MLP (feed-forward block)."""

    default = "default"
    swiglu = "swiglu"


class ActivationFunction(StrEnum):
    """Activation functions between the two linear layers of a default MLP."""

    gelu = "gelu"
    gelu_tanh = "gelu_tanh"


class PositionType(StrEnum):
    """Types of relative position embedding."""

    none = "none"
    rotary = "rotary"
    rotary_complex = "rotary_complex"


class Precision(StrEnum):
    """Data types of matmuls. With bfloat16 and float16, parameters and optimizer state are still float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


class LayerNormConfig(Section):
    """Settings of LayerNorm and RMSNorm. Only LayerNorm supports a bias."""

    layernorm_epsilon: float = Field(1e-5, gt=0, description="Added to the variance (or mean square) before the square root.")
    layernorm_bias: bool = Field(False, description="Add a bias. For norm_type layernorm only.")


class RotaryScalingConfig(Section):
    """RoPE scaling for longer sequences than those of pretraining (Llama 3.1).

    Frequencies whose wavelength is at least original_sequence_length / low_frequency_factor tokens are divided by `factor`. Those whose
    wavelength is at most original_sequence_length / high_frequency_factor are unchanged, and those in between are interpolated.
    """

    factor: float = Field(8.0, ge=1, description="Factor by which low frequencies are divided.")
    low_frequency_factor: float = Field(
        1.0, gt=0, description="Frequencies with at most this many periods in original_sequence_length are divided by factor."
    )
    high_frequency_factor: float = Field(
        4.0, gt=0, description="Frequencies with at least this many periods in original_sequence_length are unchanged."
    )
    original_sequence_length: int = Field(8192, ge=1, description="Sequence length before scaling, in tokens.")

    @model_validator(mode="after")
    def _check_frequency_order(self) -> RotaryScalingConfig:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise build_field_error(
                "high_frequency_factor",
                f"{self.high_frequency_factor} is not greater than low_frequency_factor {self.low_frequency_factor}",
            )
        return self


class LoraLayer(StrEnum):
    """Layers of a block that can have a LoRA adapter."""

    query = "query"
    key = "key"
    value = "value"
    output = "output"
    gate = "gate"
    up = "up"
    down = "down"


class LoraConfig(Section):
    """LoRA: add a product B A of two low-rank matrices to the weight matrix of a layer. Only A and B are trained."""

    rank: int = Field(8, ge=1, description="LoRA rank: rows of A and columns of B.")
    alpha: float = Field(16.0, gt=0, description="LoRA scale: B A is multiplied by alpha / rank.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the adapters' input in training.")
    layers: tuple[LoraLayer, ...] = Field(
        (LoraLayer.query, LoraLayer.value),
        min_length=1,
        strict=False,
        description="Layers with an adapter: query, key, value and output of attention; gate, up and down of the MLP.",
    )


class AdapterConfig(Section):
    """Bottleneck adapters: a narrow block after attention and after the MLP. Only the adapters are trained."""

    attention_downsampling_factor: float | None = Field(
        0.25, gt=0, description="Width of the adapter after attention, as a multiple of hidden_size. null: no adapter there."
    )
    mlp_downsampling_factor: float | None = Field(
        0.25, gt=0, description="Width of the adapter after the MLP, as a multiple of hidden_size. null: no adapter there."
    )

    @model_validator(mode="after")
    def _check_adapter_exists(self) -> AdapterConfig:
        if self.attention_downsampling_factor is None and self.mlp_downsampling_factor is None:
            raise build_field_error("mlp_downsampling_factor", "is null, as is attention_downsampling_factor: there is nothing to train")
        return self


class Pooling(StrEnum):
    """How the hidden states of a text's tokens are pooled into one vector."""

    mean = "mean"
    weighted_mean = "weighted_mean"
    last_token = "last_token"  # noqa: S105  # no secret


class EmbeddingHeadConfig(Section):
    """Embedding head: returns one L2-normalized embedding per text, in place of the output layer that returns logits."""

    pooling: Pooling = Field(
        Pooling.weighted_mean,
        description="mean: all tokens equally. weighted_mean: each token weighted by its position. last_token: the last token only.",
    )
    proj_layers: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="Widths of linear layers after pooling, with a GELU between them. []: none; the embedding has hidden_size dimensions.",
    )


class UmupConfig(Section):
    """u-muP: a parametrization in which the optimal learning rate transfers from a narrow model to a wide one."""

    enable: bool = Field(False, description="Scale operations and learning rates by u-muP. Learning rates are then near 1, not near 0.001.")
    normalize_depth_to_num_layers: bool = Field(
        False, description="Use num_layers as the depth, not the number of residual branches (two per layer)."
    )
    attn_mult: float = Field(1.0, gt=0, description="Multiplier of the attention scores.")
    act_mult: float = Field(1.0, gt=0, description="Multiplier of the input of the MLP's GELU or SiLU.")
    residual_mult: float = Field(1.0, gt=0, description="Strength of the residual branches relative to the embedding.")
    residual_attn_ratio: float = Field(1.0, gt=0, description="Strength of attention branches relative to MLP branches.")
    loss_mult: float = Field(1.0, gt=0, description="Multiplier of the logits.")


class TransformerArchitectureConfig(Section):
    """A decoder-only transformer with causal attention."""

    vocab_size: int = Field(256, ge=2, description="Number of tokens in the vocabulary. 256: bytes.")
    hidden_size: int = Field(128, ge=1, description="Width of the residual stream.")
    num_layers: int = Field(4, ge=1, description="Number of transformer blocks.")
    num_attention_heads: int = Field(4, ge=1, description="Number of attention heads.")
    attention_num_kv_heads: int | None = Field(
        None, ge=1, description="Number of key and value heads, each shared by a group of query heads (GQA). null: num_attention_heads."
    )
    attention_head_size: int | None = Field(None, ge=1, description="Dimensions per head. null: hidden_size / num_attention_heads.")
    sequence_length: int = Field(256, ge=1, description="Tokens per sample.")
    num_local_attention_heads: int = Field(
        0, ge=0, description="Number of heads with sliding-window attention, the first ones. All others attend to every earlier token."
    )
    local_attention_window_size: int | None = Field(
        None, ge=1, description="Sliding window of the local heads: earlier tokens that a token attends to. null: no local heads."
    )
    local_attention_layers: tuple[bool, ...] | None = Field(
        None,
        min_length=1,
        description="Which layers have the local heads, as a pattern that is repeated for all layers: [true, false] is every second "
        "layer, starting with the first. null: all layers.",
    )
    attention_softcap: float | None = Field(
        None, gt=0, description="Soft-capping of attention scores s at this value c, to c tanh(s / c), as in Gemma 2. null: none."
    )
    logit_softcap: float | None = Field(
        None, gt=0, description="Soft-capping of the logits s of the output layer at this value c, to c tanh(s / c). null: none."
    )
    attention_bias: bool = Field(False, description="Add biases to the query, key, value and output projections of attention.")
    attention_output_bias: bool | None = Field(None, description="Add a bias to attention's output projection. null: as attention_bias.")
    key_query_norm: bool = Field(False, description="Normalize each head's queries and keys (QK norm), before the rotary embedding.")
    relative_position_embedding_type: PositionType = Field(
        PositionType.rotary,
        description="rotary: RoPE that pairs dimension i with i + half of those that rotate. rotary_complex: RoPE that "
        "pairs neighbors. none: no rotary encoding.",
    )
    rotary_embedding_base: float = Field(10000, ge=1, description="Base of the rotary frequencies (RoPE theta).")
    rotary_scaling: RotaryScalingConfig | None = Field(
        None, description="RoPE scaling for longer sequences; {} for Llama 3.1's values. null: no scaling."
    )
    rotary_percentage: float = Field(1.0, gt=0, le=1, description="Fraction of each head's dimensions that rotates, the first ones.")
    learned_positions: bool = Field(False, description="Add a learned position embedding to each token's embedding, as in GPT-2.")
    reset_attention_mask: bool = Field(False, description="Mask attention between documents packed into one sample.")
    reset_position_ids: bool = Field(False, description="Restart positions at 0 for each document of a sample.")
    norm_type: NormType = Field(NormType.layernorm, description="layernorm, or rms (RMSNorm).")
    mlp_type: MlpType = Field(MlpType.default, description="default (two matrices) or swiglu (three matrices).")
    activation_function: ActivationFunction = Field(
        ActivationFunction.gelu, description="Activation for mlp_type default: gelu, or gelu_tanh, its tanh approximation."
    )
    parallel_residual: bool = Field(False, description="Compute attention and MLP of a layer from the same residual stream, as in GPT-J.")
    layernorm: LayerNormConfig = Field(LayerNormConfig(), description="Settings of all norms, of either norm_type.")
    mlp_bias: bool = Field(False, description="Add biases to the MLP.")
    mlp_factor: float = Field(4.0, gt=0, description="Width of the MLP, as a multiple of hidden_size.")
    weight_tying: bool = Field(True, description="Share the embedding's weights with the output layer.")
    dropout_embedding: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the embedding's output in training.")
    dropout_attention_probs: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="Dropout probability of the attention weights in training. Unlike the other dropout masks, this one "
        "depends on the topology.",
    )
    dropout_after_attention: float = Field(0.0, ge=0, lt=1, description="Dropout probability of attention's output in training.")
    dropout_after_mlp: float = Field(0.0, ge=0, lt=1, description="Dropout probability of the MLP's output in training.")
    lora_config: LoraConfig | None = Field(None, description="LoRA adapters for fine-tuning; {} for the defaults. null: none.")
    adapter_config: AdapterConfig | None = Field(
        None,
        description="Bottleneck adapters after attention and the MLP for fine-tuning; {} for the defaults. null: none.",
    )
    embedding_head_config: EmbeddingHeadConfig | None = Field(
        None,
        description="Return one embedding per text instead of logits, trained by trainer.contrastive_config; {} for the "
        "defaults. null: logits.",
    )
    umup: UmupConfig = Field(UmupConfig(), description="u-muP parametrization. For AdamW only, without weight_tying and gradient clipping.")
    precision: Precision = Field(
        Precision.float32,
        description="Data type of weights and activations: float32; bfloat16 or float16, cast from float32 parameters; float64 for "
        "equivalence tests.",
    )
    fp8_config_attention: FP8LinearConfig | None = Field(
        None, description="Compute the query, key and value projections in float8; {} for the defaults. null: in precision."
    )
    fp8_config_attention_dense_out: FP8LinearConfig | None = Field(
        None, description="Compute attention's output projection in float8; {} for the defaults. null: in precision."
    )
    fp8_config_mlp: FP8LinearConfig | None = Field(
        None, description="Compute the MLP's projections before its GELU or SwiGLU in float8; {} for the defaults. null: in precision."
    )
    fp8_config_mlp_dense_out: FP8LinearConfig | None = Field(
        None, description="Compute the MLP's output projection in float8; {} for the defaults. null: in precision."
    )
    fp8_emulate: bool = Field(
        False, description="Emulate float8 on any device: round to float8, multiply in float32. Slow; for studying the effect on a model."
    )

    @model_validator(mode="after")
    def _check_attention_heads(self) -> TransformerArchitectureConfig:
        if self.attention_head_size is None:
            check_is_multiple("hidden_size", self.hidden_size, "num_attention_heads", self.num_attention_heads)
        if self.head_size % 2 and self.rotary_dimensions:
            name = "num_attention_heads" if self.attention_head_size is None else "attention_head_size"
            raise build_field_error(name, f"rotary embeddings need an even head size, not {self.head_size}")
        check_is_multiple("num_attention_heads", self.num_attention_heads, "attention_num_kv_heads", self.kv_heads)
        return self

    @model_validator(mode="after")
    def _check_rotary_dimensions(self) -> TransformerArchitectureConfig:
        rotary = self.relative_position_embedding_type is not PositionType.none
        if rotary and (self.rotary_dimensions < _ROTARY_PAIR or self.rotary_dimensions % _ROTARY_PAIR):
            reason = (
                f"{self.rotary_percentage} of a head's {self.head_size} dimensions are {self.rotary_dimensions}, which is not a "
                f"positive even number"
            )
            raise build_field_error(
                "rotary_percentage", reason, f"{_ROTARY_PAIR * max(1, self.rotary_dimensions // _ROTARY_PAIR) / self.head_size} would fit"
            )
        return self

    @model_validator(mode="after")
    def _check_local_attention(self) -> TransformerArchitectureConfig:
        local, window = self.num_local_attention_heads, self.local_attention_window_size
        if local and window is None:
            raise build_field_error("num_local_attention_heads", f"{local} local heads need local_attention_window_size")
        if window is not None and not local:
            raise build_field_error("local_attention_window_size", "applies only to local heads, but num_local_attention_heads is 0")
        if local > self.num_attention_heads:
            raise build_field_error(
                "num_local_attention_heads", f"{local} local heads exceed num_attention_heads {self.num_attention_heads}"
            )
        if self.local_attention_layers is not None and not local:
            raise build_field_error("local_attention_layers", "applies only to local heads, but num_local_attention_heads is 0")
        if self.local_attention_layers is not None and not any(self.count_local_heads(layer) for layer in range(self.num_layers)):
            raise build_field_error("local_attention_layers", f"selects none of the {self.num_layers} layers", "leave out the window")
        check_is_multiple(
            "num_local_attention_heads", local, "the number of query heads per key/value head,", self.num_attention_heads // self.kv_heads
        )
        return self

    @model_validator(mode="after")
    def _check_logit_softcap(self) -> TransformerArchitectureConfig:
        if self.logit_softcap is not None and self.embedding_head_config is not None:
            raise build_field_error("logit_softcap", "applies to logits, but embedding_head_config returns vectors", "leave it out")
        return self

    @model_validator(mode="after")
    def _check_norm_bias(self) -> TransformerArchitectureConfig:
        if self.layernorm.layernorm_bias and self.norm_type is NormType.rms:
            raise build_field_error("layernorm.layernorm_bias", "norm_type rms has no bias", "leave it out, or set norm_type: layernorm")
        return self

    @model_validator(mode="after")
    def _check_dependent_fields(self) -> TransformerArchitectureConfig:
        if self.activation_function is not ActivationFunction.gelu and self.mlp_type is not MlpType.default:
            raise build_field_error("activation_function", f"applies only to mlp_type default, but mlp_type is {self.mlp_type}")
        if self.rotary_scaling is not None and self.relative_position_embedding_type is PositionType.none:
            raise build_field_error("rotary_scaling", "applies only to rotary embeddings, but relative_position_embedding_type is none")
        return self

    @model_validator(mode="after")
    def _check_umup_compatibility(self) -> TransformerArchitectureConfig:
        unsupported = ("learned_positions", "parallel_residual", "lora_config", "adapter_config", "embedding_head_config")
        for name in (*unsupported, "attention_softcap", "logit_softcap"):
            if self.umup.enable and getattr(self, name):
                raise build_field_error(name, "has no u-muP scaling rule", f"leave {name} out, or set umup.enable: false")
        if self.umup.enable and self.weight_tying:
            reason = "u-muP scales the embedding and the output layer differently, so they cannot share weights"
            raise build_field_error("weight_tying", reason, "set weight_tying: false, or umup.enable: false")
        return self

    @model_validator(mode="after")
    def _check_lora_layers(self) -> TransformerArchitectureConfig:
        if self.lora_config is None:
            return self
        if LoraLayer.gate in self.lora_config.layers and self.mlp_type is not MlpType.swiglu:
            raise build_field_error("lora_config.layers", f"mlp_type {self.mlp_type} has no gate", "leave gate out")
        if len(set(self.lora_config.layers)) < len(self.lora_config.layers):
            raise build_field_error("lora_config.layers", "lists a layer twice", "remove one of them")
        return self

    @model_validator(mode="after")
    def _check_float8_precision(self) -> TransformerArchitectureConfig:
        for name, config in self.float8_layers.items():
            if self.precision not in (Precision.bfloat16, Precision.float32):
                raise build_field_error(
                    "precision",
                    f"{self.precision} does not support float8 matmuls, which {name} enables",
                    f"set precision: bfloat16, or leave out {name}",
                )
            if config.scaling is FP8Scaling.rowwise and self.precision is not Precision.bfloat16:
                raise build_field_error(
                    f"{name}.scaling", "rowwise scaling supports only bfloat16", "set precision to bfloat16, or scaling to tensorwise"
                )
        if self.fp8_emulate and not self.float8_layers:
            raise build_field_error("fp8_emulate", "has an effect only on float8 matmuls, but no fp8_config_… is set")
        return self

    @property
    def float8_layers(self) -> dict[str, FP8LinearConfig]:
        """The layers whose matmuls are computed in float8, by field name."""
        fields = ("fp8_config_attention", "fp8_config_attention_dense_out", "fp8_config_mlp", "fp8_config_mlp_dense_out")
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}

    @property
    def head_size(self) -> int:
        """Number of dimensions per attention head."""
        return self.attention_head_size or self.hidden_size // self.num_attention_heads

    @property
    def attention_width(self) -> int:
        """Number of dimensions of all attention heads together."""
        return self.num_attention_heads * self.head_size

    @property
    def rotary_dimensions(self) -> int:
        """Number of dimensions per attention head that RoPE rotates."""
        return int(self.head_size * self.rotary_percentage) if self.relative_position_embedding_type is not PositionType.none else 0

    @property
    def mlp_width(self) -> int:
        """Width (intermediate size) of the MLP."""
        return int(self.hidden_size * self.mlp_factor)

    @property
    def peft_fields(self) -> tuple[str, ...]:
        """Names of the fields that add a PEFT adapter to the model."""
        return tuple(name for name in ("lora_config", "adapter_config") if getattr(self, name) is not None)

    @property
    def has_tied_embeddings(self) -> bool:
        """Whether the output layer shares the embedding's weights."""
        return self.weight_tying and self.embedding_head_config is None

    @property
    def embedding_size(self) -> int | None:
        """Number of dimensions of a text embedding; None if the model returns logits."""
        head = self.embedding_head_config
        return (self.hidden_size, *head.proj_layers)[-1] if head else None

    @property
    def has_dropout(self) -> bool:
        """Whether training applies dropout outside the attention weights."""
        lora_dropout = self.lora_config.dropout if self.lora_config else 0.0
        return any((self.dropout_embedding, self.dropout_after_attention, self.dropout_after_mlp, lora_dropout))

    @property
    def needs_document_ids(self) -> bool:
        """Whether the model needs the document id of each token in a sample."""
        return self.reset_attention_mask or self.reset_position_ids

    @property
    def has_attention_output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.attention_bias if self.attention_output_bias is None else self.attention_output_bias

    def count_local_heads(self, layer: int) -> int:
        """Return the number of local heads of the layer with the index `layer`."""
        pattern = self.local_attention_layers or (True,)
        return self.num_local_attention_heads if pattern[layer % len(pattern)] else 0

    @property
    def has_full_attention(self) -> bool:
        """Whether any head attends to all earlier tokens."""
        return any(self.count_local_heads(layer) < self.num_attention_heads for layer in range(self.num_layers))

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads."""
        return self.attention_num_kv_heads or self.num_attention_heads
