"""`transformer_architecture` as Hugging Face's config.json.

Each family of models there is a kind of decoder-only transformer, and says by names of its own what we say by ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import SwarmtrainError

_MODERN = {
    "relative_position_embedding_type": "rotary",
    "rotary_percentage": 1.0,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "umup.enable": False,
}
_ALL_SEE_ALL = {"num_local_attention_heads": 0}


@dataclass(frozen=True)
class Family:
    """One of Hugging Face's: what it fixes of an architecture, by our names."""

    name: str
    """Its model_type."""
    model: str
    """Its class with a head."""
    fixed: Mapping[str, Any]
    output_like_rest: bool = True
    """Whether attention's output has a bias when queries have one."""


FAMILIES = (
    Family("llama", "LlamaForCausalLM", {**_MODERN, **_ALL_SEE_ALL, "key_query_norm": False}),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        {**_MODERN, **_ALL_SEE_ALL, "key_query_norm": False, "attention_bias": True, "mlp_bias": False},
        output_like_rest=False,
    ),
    Family("qwen3", "Qwen3ForCausalLM", {**_MODERN, **_ALL_SEE_ALL, "key_query_norm": True, "mlp_bias": False}),
    Family("mistral", "MistralForCausalLM", {**_MODERN, "key_query_norm": False, "attention_bias": False, "mlp_bias": False}),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            **_ALL_SEE_ALL,
            "relative_position_embedding_type": "rotary",
            "norm_type": "layernorm",
            "layernorm.layernorm_bias": True,
            "mlp_type": "default",
            "mlp_bias": True,
            "key_query_norm": False,
            "umup.enable": False,
        },
    ),
)


def family(shape: TransformerArchitectureConfig) -> Family:
    """Return the family that `shape` is of. Raises SwarmtrainError with what differs from the nearest if it is of none."""
    found = [(_unlike(shape, one), one) for one in FAMILIES]
    unlike, nearest = min(found, key=lambda pair: len(pair[0]))
    if unlike:
        raise SwarmtrainError(
            f"is of no family that Hugging Face's files can say; the nearest is {nearest.name}, for which {'; '.join(unlike)}",
            place="config transformer_architecture",
            hint=f"there are {', '.join(one.name for one in FAMILIES)}",
        )
    return nearest


def described(shape: TransformerArchitectureConfig, dtype: str) -> dict[str, Any]:
    """Return the config.json of a model of this shape, whose tensors are in `dtype`. Raises SwarmtrainError as `family` does."""
    kind = family(shape)
    values: dict[str, Any] = {
        "architectures": [kind.model],
        "model_type": kind.name,
        "dtype": dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.mlp_width,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "max_position_embeddings": shape.sequence_length,
        "tie_word_embeddings": shape.weight_tying,
        "use_cache": True,
        # Ours are the data's; those that Hugging Face would take for granted need not be in the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if kind.name == "gpt_neox":
        return values | {
            "hidden_act": "gelu",
            "layer_norm_eps": shape.layernorm.layernorm_epsilon,
            "rotary_emb_base": shape.rotary_embedding_base,
            "rotary_pct": shape.rotary_percentage,
            "attention_bias": shape.attention_bias,
            "use_parallel_residual": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
    values |= {
        "hidden_act": "silu",
        "rms_norm_eps": shape.layernorm.layernorm_epsilon,
        "rope_theta": shape.rotary_embedding_base,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "attention_dropout": 0.0,
    }
    if kind.name in ("llama", "qwen3"):
        values["attention_bias"] = shape.attention_bias
    if kind.name == "llama":
        values["mlp_bias"] = shape.mlp_bias
    if kind.name == "mistral":
        # A token's own place counts in their window.
        values["sliding_window"] = None if shape.local_attention_window_size is None else shape.local_attention_window_size + 1
    return values


def architecture(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the `transformer_architecture` that a config.json says. Raises SwarmtrainError with what of it we have not."""
    name = values.get("model_type")
    kind = next((one for one in FAMILIES if one.name == name), None)
    if kind is None:
        hint = f"there are {', '.join(one.name for one in FAMILIES)}"
        raise SwarmtrainError(f"its model_type {name!r} is none that can be read", place=place, hint=hint)
    try:
        made = _read(values, kind)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise SwarmtrainError(f"makes no sense: {error!r}", place=place) from None
    if strange := _strange(values, kind, made["hidden_size"] // made["num_attention_heads"]):
        raise SwarmtrainError(f"is a {name} of a kind that we have not: {'; '.join(strange)}", place=place)
    return made


def _read(values: Mapping[str, Any], kind: Family) -> dict[str, Any]:
    hidden, rope = values["hidden_size"], values.get("rope_parameters") or {}
    neox = kind.name == "gpt_neox"
    made = {
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": values["num_hidden_layers"],
        "num_attention_heads": values["num_attention_heads"],
        "sequence_length": values["max_position_embeddings"],
        "rotary_embedding_base": float(rope.get("rope_theta") or values.get("rotary_emb_base" if neox else "rope_theta") or 10000),
        "mlp_factor": _factor(values["intermediate_size"], hidden),
        "weight_tying": values.get("tie_word_embeddings", False),
        "attention_bias": kind.fixed.get("attention_bias", values.get("attention_bias", neox)),
        "mlp_bias": kind.fixed.get("mlp_bias", values.get("mlp_bias", False)),
        "key_query_norm": kind.fixed["key_query_norm"],
        "norm_type": kind.fixed["norm_type"],
        "mlp_type": kind.fixed["mlp_type"],
        "layernorm": {"layernorm_epsilon": values.get("layer_norm_eps", 1e-5) if neox else values.get("rms_norm_eps", 1e-6)},
    }
    if neox:
        made["layernorm"]["layernorm_bias"] = True
        made["rotary_percentage"] = float(rope.get("partial_rotary_factor") or values.get("rotary_pct", 0.25))
        return made
    made["attention_num_kv_heads"] = values.get("num_key_value_heads")
    if not kind.output_like_rest:
        made["attention_output_bias"] = False
    if kind.name == "mistral" and values.get("sliding_window") is not None:
        made |= {"num_local_attention_heads": made["num_attention_heads"], "local_attention_window_size": values["sliding_window"] - 1}
    return made


def _strange(values: Mapping[str, Any], kind: Family, head_size: int) -> list[str]:
    """Return what of a config.json has no place in our architecture."""
    rope = values.get("rope_scaling") or values.get("rope_parameters") or {}
    usual: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("gelu",) if kind.name == "gpt_neox" else ("silu",),
        "head_dim": (None, head_size),
        "use_sliding_window": (None, False),
        "quantization_config": (None,),
        "use_parallel_residual": (False,) if kind.name == "gpt_neox" else (None,),
    }
    found = [f"{key} is {values.get(key)!r}" for key, known in usual.items() if values.get(key) not in known]
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
        found.append(f"rotary positions are scaled by {scaling!r}")
    return found


def _factor(width: int, hidden: int) -> float:
    """Return what `hidden` is multiplied by to become `width`, however that is rounded."""
    factor = width / hidden
    return factor if int(hidden * factor) == width else math.nextafter(factor, math.inf)


def _unlike(shape: TransformerArchitectureConfig, kind: Family) -> list[str]:
    """Return what of `shape` a family cannot be."""
    values = shape.model_dump(mode="json")
    wanted = {**kind.fixed, "attention_output_bias": shape.attention_bias if kind.output_like_rest else False}
    if kind.name == "mistral":
        wanted["num_local_attention_heads"] = shape.num_attention_heads
    elif kind.name == "gpt_neox":
        wanted["attention_num_kv_heads"] = shape.num_attention_heads
    here = {"attention_output_bias": shape.output_bias, "attention_num_kv_heads": shape.kv_heads}
    found = []
    for name, value in wanted.items():
        section, _, field = name.rpartition(".")
        mine = here.get(name, (values[section] if section else values)[field])
        if mine != value:
            found.append(f"{name} would be {value!r} and is {mine!r}")
    return found
