"""What a model family of Hugging Face Transformers is, as data: the keys of its config.json, and the names of its tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig

ConfigJson = Mapping[str, Any]


@dataclass(frozen=True)
class FieldMapping:
    """Mapping between one key of config.json and one field of `transformer_architecture`, given by its path."""

    hf_key: str
    config_path: str
    to_hf: Callable[[TransformerArchitectureConfig], Any] | None = None
    """Computes the key's value in config.json from an architecture. None: the value of the field is used."""
    from_hf: Callable[[Any, ConfigJson], Any] | None = None
    """Computes the field's value from the key's value and the whole config.json. None: the key's value is used."""

    def export_value(self, architecture: TransformerArchitectureConfig) -> Any:
        """Return the key's value in the config.json of `architecture`."""
        return self.to_hf(architecture) if self.to_hf else get_field_by_path(architecture, self.config_path)

    def import_value(self, config_json: ConfigJson) -> Any:
        """Return the field's value for the config.json `config_json`.

        Raises KeyError, TypeError, ValueError or ZeroDivisionError if the value in config.json is invalid.
        """
        value = config_json.get(self.hf_key)
        return self.from_hf(value, config_json) if self.from_hf else value


@dataclass(frozen=True)
class TensorNames:
    """Names of a family's modules, by the names of swarmtrain's modules."""

    top_level: Mapping[str, str]
    layer_prefix: str
    per_layer: Mapping[str, str]
    """If query, key and value have the same name, they are one tensor."""
    interleaves_heads: bool = False
    """Whether query, key and value of a head are next to each other in that tensor."""
    transposes: bool = False
    """Whether the weights of linear layers are transposed."""


@dataclass(frozen=True)
class ModelFamily:
    """A model family of Hugging Face Transformers."""

    model_type: str
    """The family's model_type in config.json."""
    model_class: str
    """The family's Transformers class with a language modeling head."""
    field_mappings: tuple[FieldMapping, ...]
    fixed_values: ConfigJson
    """Fields of `transformer_architecture` that are constant in this family, by path."""
    required_values: ConfigJson
    """Other keys of config.json and their allowed values."""
    defaults: ConfigJson
    """Values of keys that are missing in config.json: the defaults of the family's configuration class in transformers 5.23."""
    tensor_names: TensorNames
    rotary_keys: tuple[str, str] = ("rope_theta", "partial_rotary_factor")
    """Keys of config.json, next to rope_parameters, for the base of the rotary embedding, and for the fraction of rotated dimensions."""
    output_bias_follows_attention: bool = True
    """Whether attention's output projection has a bias if and only if the query projection has one."""
    has_sliding_window: bool = False
    """Whether the family supports a sliding window, which makes all heads local."""


def get_field_by_path(architecture: TransformerArchitectureConfig, path: str) -> Any:
    """Return the field of `architecture` at a dotted path."""
    return reduce(getattr, path.split("."), architecture)


def compute_mlp_factor(mlp_width: int | None, config_json: ConfigJson) -> float:
    """Return the mlp_factor that gives `mlp_width` if multiplied by the hidden size and rounded down; 4 if `mlp_width` is None."""
    hidden = _read_hidden_size(config_json)
    factor = 4.0 if mlp_width is None else mlp_width / hidden
    return factor if mlp_width is None or int(hidden * factor) == mlp_width else math.nextafter(factor, math.inf)


def normalize_head_size(size: int | None, config_json: ConfigJson) -> int | None:
    """Return `size`, but None if it is the hidden size divided by the number of heads."""
    return None if size in (None, _read_hidden_size(config_json) // config_json["num_attention_heads"]) else size


def import_rope_scaling(rope_scaling: ConfigJson | None, _: ConfigJson) -> dict[str, Any] | None:
    """Return the values of `rotary_scaling` for `rope_scaling`."""
    return None if not rope_scaling else {own_key: rope_scaling[hf_key] for hf_key, own_key in _LLAMA3_SCALING_KEYS.items()}


def export_rope_scaling(architecture: TransformerArchitectureConfig) -> dict[str, Any] | None:
    """Return `rope_scaling` of an architecture."""
    scaling = architecture.rotary_scaling
    return (
        None
        if scaling is None
        else {"rope_type": "llama3", **{hf_key: getattr(scaling, own_key) for hf_key, own_key in _LLAMA3_SCALING_KEYS.items()}}
    )


def export_activation(architecture: TransformerArchitectureConfig) -> str:
    """Return the name of an architecture's activation function in transformers."""
    return "gelu_new" if architecture.activation_function == "gelu_tanh" else "gelu"


def _read_hidden_size(config_json: ConfigJson) -> int:
    return int(config_json["n_embd"] if "n_embd" in config_json else config_json["hidden_size"])


_LLAMA3_SCALING_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence_length",
}
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""Names of activation functions in transformers, and here."""
FUSED_QKV = ("query", "key", "value")
COMMON_MAPPINGS = (
    FieldMapping("vocab_size", "vocab_size"),
    FieldMapping("hidden_size", "hidden_size"),
    FieldMapping("num_hidden_layers", "num_layers"),
    FieldMapping("num_attention_heads", "num_attention_heads"),
    FieldMapping("intermediate_size", "mlp_factor", to_hf=lambda architecture: architecture.mlp_width, from_hf=compute_mlp_factor),
    FieldMapping("max_position_embeddings", "sequence_length"),
    FieldMapping("tie_word_embeddings", "weight_tying"),
    FieldMapping("attention_dropout", "dropout_attention_probs"),
    FieldMapping("rope_scaling", "rotary_scaling", to_hf=export_rope_scaling, from_hf=import_rope_scaling),
)
COMMON_FIXED_VALUES = {"umup.enable": False, "learned_positions": False, "key_query_norm": False}
GPT_FIXED_VALUES = {
    **COMMON_FIXED_VALUES,
    "norm_type": "layernorm",
    "layernorm.layernorm_bias": True,
    "mlp_type": "default",
    "mlp_bias": True,
}
