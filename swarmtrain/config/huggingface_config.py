"""Convert the config section `transformer_architecture` to and from Hugging Face's config.json.

Each supported model family is a variant of the decoder-only transformer, with its own names for the same fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from swarmtrain.config.families import FAMILIES
from swarmtrain.config.families.family import ConfigJson, ModelFamily, get_field_by_path
from swarmtrain.config.schema.section import Section
from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import SwarmtrainError

_LM_HEAD_SUFFIX = re.compile("ForCausalLM|LMHeadModel")


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
        config_json = {**model_family.defaults, **_flatten_rope_parameters(config_json, model_family)}
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


def _flatten_rope_parameters(config_json: ConfigJson, model_family: ModelFamily) -> dict[str, Any]:
    """Return config.json with the rotary settings that transformers uses, under its older keys rope_theta, rotary_pct and rope_scaling.

    Of several settings, the first counts: in rope_scaling, if it is set; in rope_parameters; next to them (transformers'
    RotaryEmbeddingConfigMixin).
    """
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        return dict(config_json)
    theta_key, partial_key = model_family.rotary_keys
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
    if "rotary_percentage" in model_family.fixed_values and config_json.get("rotary_pct", 1.0) != 1.0:
        unsupported.append(f"partial_rotary_factor is {config_json['rotary_pct']!r}")
    rope = config_json.get("rope_scaling") or {}
    if rope and (scaling := rope.get("rope_type", rope.get("type"))) != "llama3":
        unsupported.append(f"the RoPE scaling type is {scaling!r}")
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
    pairs = {path: (resolved.get(path, get_field_by_path(architecture, path)), value) for path, value in expected.items()}
    return [f"{path} must be {value!r}, not {_format_field_value(actual)}" for path, (actual, value) in pairs.items() if actual != value]


def _format_field_value(value: Any) -> str:
    return "set" if isinstance(value, Section) else repr(getattr(value, "value", value))
