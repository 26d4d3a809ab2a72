"""Convert the config section `transformer_architecture` to and from Hugging Face's config.json.

Each supported model family is a variant of the decoder-only transformer, with its own names for the same fields.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from swarmtrain.config.schema.section import Section
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import SwarmtrainError

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
        return self.to_hf(architecture) if self.to_hf else _get_field_by_path(architecture, self.config_path)

    def import_value(self, config_json: ConfigJson) -> Any:
        """Return the field's value for the config.json `config_json`.

        Raises KeyError, TypeError, ValueError or ZeroDivisionError if the value in config.json is invalid.
        """
        value = config_json.get(self.hf_key)
        return self.from_hf(value, config_json) if self.from_hf else value


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
    """Values of keys that are missing in config.json: the defaults of the family's configuration class."""
    output_bias_follows_attention: bool = True
    """Whether attention's output projection has a bias if and only if the query projection has one."""
    has_sliding_window: bool = False
    """Whether the family supports a sliding window, which makes all heads local."""


def _compute_mlp_factor(mlp_width: int | None, config_json: ConfigJson) -> float:
    """Return the mlp_factor that gives `mlp_width` if multiplied by the hidden size and rounded down; 4 if `mlp_width` is None."""
    hidden = _read_hidden_size(config_json)
    factor = 4.0 if mlp_width is None else mlp_width / hidden
    return factor if mlp_width is None or int(hidden * factor) == mlp_width else math.nextafter(factor, math.inf)


def _normalize_head_size(size: int | None, config_json: ConfigJson) -> int | None:
    return None if size in (None, _read_hidden_size(config_json) // config_json["num_attention_heads"]) else size


def _import_rope_scaling(rope_scaling: ConfigJson | None, _: ConfigJson) -> dict[str, Any] | None:
    return None if not rope_scaling else {own_key: rope_scaling[hf_key] for hf_key, own_key in _LLAMA3_SCALING_KEYS.items()}


def _export_rope_scaling(architecture: TransformerArchitectureConfig) -> dict[str, Any] | None:
    scaling = architecture.rotary_scaling
    return (
        None
        if scaling is None
        else {"rope_type": "llama3", **{hf_key: getattr(scaling, own_key) for hf_key, own_key in _LLAMA3_SCALING_KEYS.items()}}
    )


def _export_activation(architecture: TransformerArchitectureConfig) -> str:
    return "gelu_new" if architecture.activation_function == "gelu_tanh" else "gelu"


def _read_hidden_size(config_json: ConfigJson) -> int:
    return int(config_json["n_embd"] if "n_embd" in config_json else config_json["hidden_size"])


_LLAMA3_SCALING_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence_length",
}
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_COMMON_MAPPINGS = (
    FieldMapping("vocab_size", "vocab_size"),
    FieldMapping("hidden_size", "hidden_size"),
    FieldMapping("num_hidden_layers", "num_layers"),
    FieldMapping("num_attention_heads", "num_attention_heads"),
    FieldMapping("intermediate_size", "mlp_factor", to_hf=lambda architecture: architecture.mlp_width, from_hf=_compute_mlp_factor),
    FieldMapping("max_position_embeddings", "sequence_length"),
    FieldMapping("tie_word_embeddings", "weight_tying"),
    FieldMapping("attention_dropout", "dropout_attention_probs"),
)
_ROPE_SCALING_MAPPING = (FieldMapping("rope_scaling", "rotary_scaling", to_hf=_export_rope_scaling, from_hf=_import_rope_scaling),)
_LLAMA_MAPPINGS = (
    *_COMMON_MAPPINGS,
    *_ROPE_SCALING_MAPPING,
    FieldMapping("rope_theta", "rotary_embedding_base"),
    FieldMapping("num_key_value_heads", "attention_num_kv_heads", to_hf=lambda architecture: architecture.kv_heads),
    FieldMapping("head_dim", "attention_head_size", to_hf=lambda architecture: architecture.head_size, from_hf=_normalize_head_size),
    FieldMapping("rms_norm_eps", "layernorm.layernorm_epsilon"),
)
_LM_HEAD_SUFFIX = re.compile("ForCausalLM|LMHeadModel")
_ATTENTION_BIAS_MAPPING, _MLP_BIAS_MAPPING = (
    FieldMapping("attention_bias", "attention_bias"),
    FieldMapping("mlp_bias", "mlp_bias"),
)
_SLIDING_WINDOW_MAPPING = FieldMapping(
    "sliding_window",
    "local_attention_window_size",
    # Hugging Face's window includes the token itself.
    to_hf=lambda architecture: None if architecture.local_attention_window_size is None else architecture.local_attention_window_size + 1,
    from_hf=lambda size, _: None if size is None else size - 1,
)
_COMMON_FIXED_VALUES = {"umup.enable": False, "learned_positions": False, "key_query_norm": False}
_LLAMA_FIXED_VALUES = {
    **_COMMON_FIXED_VALUES,
    "relative_position_embedding_type": "rotary",
    "rotary_percentage": 1.0,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "parallel_residual": False,
}
_GPT_FIXED_VALUES = {
    **_COMMON_FIXED_VALUES,
    "norm_type": "layernorm",
    "layernorm.layernorm_bias": True,
    "mlp_type": "default",
    "mlp_bias": True,
}
_SILU_REQUIRED_VALUES = {"hidden_act": "silu", "use_sliding_window": (None, False), "quantization_config": None}
# The values of transformers 5.23.
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
}
_QWEN_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_MISTRAL_DEFAULTS = {
    **_LLAMA_DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_NEOX_DEFAULTS = {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 10000.0,
    "rotary_pct": 0.25,
    "use_parallel_residual": True,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_GPT2_DEFAULTS = {
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
}

FAMILIES = (
    ModelFamily(
        "llama",
        "LlamaForCausalLM",
        (*_LLAMA_MAPPINGS, _ATTENTION_BIAS_MAPPING, _MLP_BIAS_MAPPING),
        _LLAMA_FIXED_VALUES,
        _SILU_REQUIRED_VALUES,
        _LLAMA_DEFAULTS,
    ),
    ModelFamily(
        "qwen2",
        "Qwen2ForCausalLM",
        _LLAMA_MAPPINGS,
        {**_LLAMA_FIXED_VALUES, "attention_bias": True, "mlp_bias": False},
        _SILU_REQUIRED_VALUES,
        _QWEN_DEFAULTS,
        output_bias_follows_attention=False,
    ),
    ModelFamily(
        "qwen3",
        "Qwen3ForCausalLM",
        (*_LLAMA_MAPPINGS, _ATTENTION_BIAS_MAPPING),
        {**_LLAMA_FIXED_VALUES, "key_query_norm": True, "mlp_bias": False},
        _SILU_REQUIRED_VALUES,
        {**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    ModelFamily(
        "mistral",
        "MistralForCausalLM",
        (*_LLAMA_MAPPINGS, _SLIDING_WINDOW_MAPPING),
        {**_LLAMA_FIXED_VALUES, "attention_bias": False, "mlp_bias": False},
        _SILU_REQUIRED_VALUES,
        _MISTRAL_DEFAULTS,
        has_sliding_window=True,
    ),
    ModelFamily(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        (
            *_COMMON_MAPPINGS,
            *_ROPE_SCALING_MAPPING,
            FieldMapping("rotary_emb_base", "rotary_embedding_base"),
            FieldMapping("rotary_pct", "rotary_percentage"),
            FieldMapping("layer_norm_eps", "layernorm.layernorm_epsilon"),
            FieldMapping("attention_bias", "attention_bias"),
            FieldMapping("use_parallel_residual", "parallel_residual"),
            FieldMapping("hidden_act", "activation_function", to_hf=_export_activation, from_hf=lambda name, _: _ACTIVATIONS[name]),
            FieldMapping("hidden_dropout", "dropout_after_attention"),
            FieldMapping("hidden_dropout", "dropout_after_mlp"),
        ),
        {**_GPT_FIXED_VALUES, "relative_position_embedding_type": "rotary"},
        {"quantization_config": None},
        _NEOX_DEFAULTS,
    ),
    ModelFamily(
        "gpt2",
        "GPT2LMHeadModel",
        (
            FieldMapping("vocab_size", "vocab_size"),
            FieldMapping("n_embd", "hidden_size"),
            FieldMapping("n_layer", "num_layers"),
            FieldMapping("n_head", "num_attention_heads"),
            FieldMapping("n_inner", "mlp_factor", to_hf=lambda architecture: architecture.mlp_width, from_hf=_compute_mlp_factor),
            FieldMapping("n_positions", "sequence_length"),
            FieldMapping("tie_word_embeddings", "weight_tying"),
            FieldMapping("layer_norm_epsilon", "layernorm.layernorm_epsilon"),
            FieldMapping(
                "activation_function",
                "activation_function",
                to_hf=_export_activation,
                from_hf=lambda name, _: _ACTIVATIONS[name],
            ),
            FieldMapping("embd_pdrop", "dropout_embedding"),
            FieldMapping("attn_pdrop", "dropout_attention_probs"),
            FieldMapping("resid_pdrop", "dropout_after_attention"),
            FieldMapping("resid_pdrop", "dropout_after_mlp"),
        ),
        {
            **_GPT_FIXED_VALUES,
            "relative_position_embedding_type": "none",
            "learned_positions": True,
            "attention_bias": True,
            "parallel_residual": False,
        },
        {
            "scale_attn_weights": (None, True),
            "scale_attn_by_inverse_layer_idx": (None, False),
            "add_cross_attention": (None, False),
            "quantization_config": None,
        },
        _GPT2_DEFAULTS,
    ),
)


def find_model_family(architecture: TransformerArchitectureConfig) -> ModelFamily:
    """Return the family of `architecture`. Raises SwarmtrainError with the differences from the most similar family if none matches."""
    candidates = [(_list_family_mismatches(architecture, candidate), candidate) for candidate in FAMILIES]
    mismatches, nearest = min(candidates, key=lambda pair: len(pair[0]))
    if mismatches:
        raise SwarmtrainError(
            f"matches no supported Hugging Face model family; the closest is {nearest.model_type}, for which {'; '.join(mismatches)}",
            place="config transformer_architecture",
            hint=f"supported model types: {', '.join(candidate.model_type for candidate in FAMILIES)}",
        )
    return nearest


def build_config_json(architecture: TransformerArchitectureConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model with this architecture and tensors of `dtype`.

    Raises SwarmtrainError if no model family matches.
    """
    model_family = find_model_family(architecture)
    # The architecture has no BOS and EOS tokens. A family's default ids may be outside the vocabulary, so they are null unless the export
    # sets them.
    model = (
        model_family.model_class if architecture.embedding_head_config is None else _LM_HEAD_SUFFIX.sub("Model", model_family.model_class)
    )
    head = {"architectures": [model], "model_type": model_family.model_type, "dtype": dtype, "bos_token_id": None, "eos_token_id": None}
    always = {key: value for key, value in model_family.required_values.items() if isinstance(value, str)}
    values = {
        **head,
        "use_cache": True,
        **always,
        **{field.hf_key: field.export_value(architecture) for field in model_family.field_mappings},
    }
    return {key: value for key, value in values.items() if key != "rope_scaling" or value}


def read_model_family(config_json: ConfigJson, location: str) -> ModelFamily:
    """Return the model family of the config.json `config_json`.

    Raises SwarmtrainError, with the file name `location`, if it is not supported.
    """
    name = config_json.get("model_type")
    model_family = next((candidate for candidate in FAMILIES if candidate.model_type == name), None)
    if model_family is None:
        hint = f"supported model types: {', '.join(candidate.model_type for candidate in FAMILIES)}"
        raise SwarmtrainError(f"model_type {name!r} is not supported", place=location, hint=hint)
    return model_family


def read_architecture_values(config_json: ConfigJson, location: str) -> dict[str, Any]:
    """Return the fields of `transformer_architecture` that the config.json `config_json` describes, by dotted path.

    Raises SwarmtrainError, with the file name `location`, if values are invalid or not supported.
    """
    model_family = read_model_family(config_json, location)
    try:
        config_json = {**model_family.defaults, **flatten_rope_parameters(config_json)}
        if unsupported := _list_unsupported_settings(config_json, model_family):
            reason = f"is a {model_family.model_type} variant that is not supported: {'; '.join(unsupported)}"
            raise SwarmtrainError(reason, place=location, hint="train it with a custom script: see docs/how-to/custom-script.md")
        architecture_values = {
            **model_family.fixed_values,
            **{field.config_path: field.import_value(config_json) for field in model_family.field_mappings},
        }
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise SwarmtrainError(f"is invalid: {error!r}", place=location, hint="download it again") from None
    if not model_family.output_bias_follows_attention:
        architecture_values["attention_output_bias"] = False
    if architecture_values.get("local_attention_window_size") is not None:
        architecture_values["num_local_attention_heads"] = architecture_values["num_attention_heads"]
    return architecture_values


def read_architecture(config_json: ConfigJson, location: str) -> TransformerArchitectureConfig:
    """Return the architecture that the config.json `config_json` describes.

    Raises SwarmtrainError, with the file name `location`, if values are invalid or not supported.
    """
    nested: dict[str, Any] = {}
    for path, value in read_architecture_values(config_json, location).items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    try:
        return TransformerArchitectureConfig.model_validate_json(json.dumps(nested))
    except ValueError as error:
        raise SwarmtrainError(f"is invalid: {error}", place=location, hint="download it again") from None


def flatten_rope_parameters(config_json: ConfigJson) -> dict[str, Any]:
    """Return config.json with the rotary settings that transformers uses, under its older keys rope_theta, rotary_pct and rope_scaling.

    Of several settings, the first counts: in rope_scaling, if it is set; in rope_parameters; next to them (transformers'
    RotaryEmbeddingConfigMixin).
    """
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return dict(config_json)
    is_neox = config_json.get("model_type") == "gpt_neox"
    theta_key, partial_key = ("rotary_emb_base", "rotary_pct") if is_neox else ("rope_theta", "partial_rotary_factor")
    partial = rope.get("partial_rotary_factor", config_json.get(partial_key))
    flat = {theta_key: rope.get("rope_theta", config_json.get(theta_key)), "rotary_pct": partial}
    scaling = dict(rope) if rope.get("rope_type", rope.get("type", "default")) != "default" else None
    if scaling:
        own_length = scaling.get("original_max_position_embeddings", config_json.get("max_position_embeddings"))
        scaling["original_max_position_embeddings"] = config_json.get("original_max_position_embeddings", own_length)
    others = {key: value for key, value in config_json.items() if key not in (theta_key, "rotary_pct", "partial_rotary_factor")}
    return {**others, **{key: value for key, value in flat.items() if value is not None}, "rope_scaling": scaling}


def _list_unsupported_settings(config_json: ConfigJson, model_family: ModelFamily) -> list[str]:
    """Return the settings of a config.json that `transformer_architecture` does not support."""
    allowed_values = {key: value if isinstance(value, tuple) else (value,) for key, value in model_family.required_values.items()}
    unsupported = [f"{key} is {config_json.get(key)!r}" for key, allowed in allowed_values.items() if config_json.get(key) not in allowed]
    if model_family.model_type != "gpt_neox" and config_json.get("rotary_pct", 1.0) != 1.0:
        unsupported.append(f"partial_rotary_factor is {config_json['rotary_pct']!r}")
    rope = config_json.get("rope_scaling") or {}
    if rope and (scaling := rope.get("rope_type", rope.get("type"))) != "llama3":
        unsupported.append(f"the RoPE scaling type is {scaling!r}")
    if model_family.model_type in ("gpt_neox", "gpt2"):
        name = config_json["hidden_act" if model_family.model_type == "gpt_neox" else "activation_function"]
        unsupported += [] if name in _ACTIVATIONS else [f"the activation function is {name!r}"]
    return unsupported


def _list_family_mismatches(architecture: TransformerArchitectureConfig, model_family: ModelFamily) -> list[str]:
    """Return the settings of `architecture` that `model_family` does not support, described for a message."""
    mapped_paths = {field.config_path for field in model_family.field_mappings}
    expected = dict(model_family.fixed_values) | {
        "adapter_config": None,
        "local_attention_layers": None,
        "attention_softcap": None,
        "logit_softcap": None,
        "attention_output_bias": architecture.attention_bias if model_family.output_bias_follows_attention else False,
    }
    if model_family.has_sliding_window and architecture.local_attention_window_size is not None:
        expected["num_local_attention_heads"] = architecture.num_attention_heads
    else:
        expected["num_local_attention_heads"] = 0
    if "attention_num_kv_heads" not in mapped_paths:
        expected |= {"attention_num_kv_heads": architecture.num_attention_heads, "attention_width": architecture.hidden_size}
    if "rotary_scaling" not in mapped_paths:
        expected["rotary_scaling"] = None
    resolved = {"attention_output_bias": architecture.has_attention_output_bias, "attention_num_kv_heads": architecture.kv_heads}
    pairs = {path: (resolved.get(path, _get_field_by_path(architecture, path)), value) for path, value in expected.items()}
    return [f"{path} must be {value!r}, not {_format_field_value(actual)}" for path, (actual, value) in pairs.items() if actual != value]


def _format_field_value(value: Any) -> str:
    return "set" if isinstance(value, Section) else repr(getattr(value, "value", value))


def _get_field_by_path(architecture: TransformerArchitectureConfig, path: str) -> Any:
    return reduce(getattr, path.split("."), architecture)
