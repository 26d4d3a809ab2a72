"""`transformer_architecture` as Hugging Face's config.json.

Each family of models there is a kind of decoder-only transformer, and says by names of its own what we say by ours.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from swarmtrain.config.base import Section
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.errors import SwarmtrainError

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """A key of config.json and the field here, by its path, that says the same."""

    theirs: str
    ours: str
    absent: Any = None
    """What it is where config.json leaves it out."""
    there: Callable[[TransformerArchitectureConfig], Any] | None = None
    """Makes it of a shape. None: as it is."""
    here: Callable[[Any, Values], Any] | None = None
    """Makes ours of it and all of config.json. None: as it is."""

    def write(self, shape: TransformerArchitectureConfig) -> Any:
        """Return what stands in config.json for `shape`."""
        return self.there(shape) if self.there else _at(shape, self.ours)

    def read(self, values: Values) -> Any:
        """Return ours of a config.json. Raises KeyError, TypeError, ValueError or ZeroDivisionError if it makes no sense."""
        value = values.get(self.theirs, self.absent)
        return self.here(value, values) if self.here else value


@dataclass(frozen=True)
class Family:
    """One of Hugging Face's."""

    name: str
    """Its model_type."""
    model: str
    """Its class with a head."""
    fields: tuple[Field, ...]
    fixed: Values
    """What it leaves no choice of, by our paths."""
    always: Values
    """What config.json must say beside, or leave out."""
    output_like_rest: bool = True
    """Whether attention's output has a bias when queries have one."""
    window: bool = False
    """Whether all heads can be local ones."""


def _factor(width: int, values: Values) -> float:
    """Return what the hidden size is multiplied by to become `width`, however that is rounded; four times it is usual."""
    hidden = _hidden(values)
    factor = 4.0 if width is None else width / hidden
    return factor if width is None or int(hidden * factor) == width else math.nextafter(factor, math.inf)


def _own_head(size: int | None, values: Values) -> int | None:
    return None if size in (None, _hidden(values) // values["num_attention_heads"]) else size


def _scaling(value: Values | None, _: Values) -> dict[str, Any] | None:
    return None if not value else {ours: value[theirs] for theirs, ours in _LLAMA3.items()}


def _scaled(shape: TransformerArchitectureConfig) -> dict[str, Any] | None:
    how = shape.rotary_scaling
    return None if how is None else {"rope_type": "llama3", **{theirs: getattr(how, ours) for theirs, ours in _LLAMA3.items()}}


def _gelu(shape: TransformerArchitectureConfig) -> str:
    return "gelu_new" if shape.activation_function == "gelu_tanh" else "gelu"


def _hidden(values: Values) -> int:
    return int(values["n_embd"] if "n_embd" in values else values["hidden_size"])


_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence_length",
}
_TANH = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_SIZES = (
    Field("vocab_size", "vocab_size"),
    Field("hidden_size", "hidden_size"),
    Field("num_hidden_layers", "num_layers"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("intermediate_size", "mlp_factor", there=lambda shape: shape.mlp_width, here=_factor),
    Field("max_position_embeddings", "sequence_length"),
    Field("tie_word_embeddings", "weight_tying", absent=False),
    Field("attention_dropout", "dropout_attention_probs", absent=0.0),
)
_ROTARY = (Field("rope_scaling", "rotary_scaling", there=_scaled, here=_scaling),)
_MODERN = (
    *_SIZES,
    *_ROTARY,
    Field("rope_theta", "rotary_embedding_base", absent=10000.0),
    Field("num_key_value_heads", "attention_num_kv_heads", there=lambda shape: shape.kv_heads),
    Field("head_dim", "attention_head_size", there=lambda shape: shape.head_size, here=_own_head),
    Field("rms_norm_eps", "layernorm.layernorm_epsilon", absent=1e-6),
)
_HEAD = re.compile("ForCausalLM|LMHeadModel")
_QUERY_BIAS, _MLP_BIAS = Field("attention_bias", "attention_bias", absent=False), Field("mlp_bias", "mlp_bias", absent=False)
_WIDE_HEAD = Field("head_dim", "attention_head_size", absent=128, there=lambda shape: shape.head_size, here=_own_head)
_WINDOW = Field(
    "sliding_window",
    "local_attention_window_size",
    # A token's own place counts in their window.
    there=lambda shape: None if shape.local_attention_window_size is None else shape.local_attention_window_size + 1,
    here=lambda size, _: None if size is None else size - 1,
)
_PLAIN = {"umup.enable": False, "learned_positions": False, "key_query_norm": False}
_GATED = {
    **_PLAIN,
    "relative_position_embedding_type": "rotary",
    "rotary_percentage": 1.0,
    "norm_type": "rms",
    "mlp_type": "swiglu",
    "parallel_residual": False,
}
_UNGATED = {**_PLAIN, "norm_type": "layernorm", "layernorm.layernorm_bias": True, "mlp_type": "default", "mlp_bias": True}
_SILU = {"hidden_act": "silu", "use_sliding_window": (None, False), "quantization_config": None}

FAMILIES = (
    Family("llama", "LlamaForCausalLM", (*_MODERN, _QUERY_BIAS, _MLP_BIAS), _GATED, _SILU),
    Family("qwen2", "Qwen2ForCausalLM", _MODERN, {**_GATED, "attention_bias": True, "mlp_bias": False}, _SILU, output_like_rest=False),
    Family("qwen3", "Qwen3ForCausalLM", (*_MODERN, _WIDE_HEAD, _QUERY_BIAS), {**_GATED, "key_query_norm": True, "mlp_bias": False}, _SILU),
    Family(
        "mistral", "MistralForCausalLM", (*_MODERN, _WINDOW), {**_GATED, "attention_bias": False, "mlp_bias": False}, _SILU, window=True
    ),
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        (
            *_SIZES,
            *_ROTARY,
            Field("rotary_emb_base", "rotary_embedding_base", absent=10000.0),
            Field("rotary_pct", "rotary_percentage", absent=0.25),
            Field("layer_norm_eps", "layernorm.layernorm_epsilon", absent=1e-5),
            Field("attention_bias", "attention_bias", absent=True),
            Field("use_parallel_residual", "parallel_residual", absent=True),
            Field("hidden_act", "activation_function", there=_gelu, here=lambda name, _: _TANH[name or "gelu"]),
            Field("hidden_dropout", "dropout_after_attention", absent=0.0),
            Field("hidden_dropout", "dropout_after_mlp", absent=0.0),
        ),
        {**_UNGATED, "relative_position_embedding_type": "rotary"},
        {"quantization_config": None},
    ),
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        (
            Field("vocab_size", "vocab_size"),
            Field("n_embd", "hidden_size"),
            Field("n_layer", "num_layers"),
            Field("n_head", "num_attention_heads"),
            Field("n_inner", "mlp_factor", there=lambda shape: shape.mlp_width, here=_factor),
            Field("n_positions", "sequence_length"),
            Field("tie_word_embeddings", "weight_tying", absent=True),
            Field("layer_norm_epsilon", "layernorm.layernorm_epsilon", absent=1e-5),
            Field(
                "activation_function",
                "activation_function",
                there=_gelu,
                here=lambda name, _: _TANH[name or "gelu_new"],
            ),
            Field("embd_pdrop", "dropout_embedding", absent=0.1),
            Field("attn_pdrop", "dropout_attention_probs", absent=0.1),
            Field("resid_pdrop", "dropout_after_attention", absent=0.1),
            Field("resid_pdrop", "dropout_after_mlp", absent=0.1),
        ),
        {
            **_UNGATED,
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
    # Ours are the data's; those that Hugging Face would take for granted need not be in the vocabulary.
    model = kind.model if shape.embedding_head_config is None else _HEAD.sub("Model", kind.model)
    head = {"architectures": [model], "model_type": kind.name, "dtype": dtype, "bos_token_id": None, "eos_token_id": None}
    always = {key: value for key, value in kind.always.items() if isinstance(value, str)}
    values = {**head, "use_cache": True, **always, **{field.theirs: field.write(shape) for field in kind.fields}}
    return {key: value for key, value in values.items() if key != "rope_scaling" or value}


def known(values: Values, place: str) -> Family:
    """Return the family of a config.json. Raises SwarmtrainError if there is none."""
    name = values.get("model_type")
    kind = next((one for one in FAMILIES if one.name == name), None)
    if kind is None:
        hint = f"there are {', '.join(one.name for one in FAMILIES)}"
        raise SwarmtrainError(f"its model_type {name!r} is none that can be read", place=place, hint=hint)
    return kind


def paths(values: Values, place: str) -> dict[str, Any]:
    """Return the `transformer_architecture` that a config.json says, by our paths.

    Raises SwarmtrainError with what of it makes no sense, or we have not.
    """
    kind, values = known(values, place), plain(values)
    try:
        if strange := _strange(values, kind):
            reason = f"is a {kind.name} of a kind that we have not: {'; '.join(strange)}"
            raise SwarmtrainError(reason, place=place, hint="a script of your own can train it: docs/how-to/own-script.md")
        made = {**kind.fixed, **{field.ours: field.read(values) for field in kind.fields}}
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise SwarmtrainError(f"makes no sense: {error!r}", place=place, hint="download it again") from None
    if not kind.output_like_rest:
        made["attention_output_bias"] = False
    if made.get("local_attention_window_size") is not None:
        made["num_local_attention_heads"] = made["num_attention_heads"]
    return made


def architecture(values: Values, place: str) -> TransformerArchitectureConfig:
    """Return the shape that a config.json says. Raises as `paths` does."""
    nested: dict[str, Any] = {}
    for path, value in paths(values, place).items():
        section, _, name = path.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[name] = value
    try:
        return TransformerArchitectureConfig.model_validate_json(json.dumps(nested))
    except ValueError as error:
        raise SwarmtrainError(f"makes no sense: {error}", place=place, hint="download it again") from None


def plain(values: Values) -> dict[str, Any]:
    """Return config.json with rotary positions as they were told before they had a section of their own."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, Mapping):
        return dict(values)
    neox = values.get("model_type") == "gpt_neox"
    told = {"rotary_emb_base" if neox else "rope_theta": rope.get("rope_theta"), "rotary_pct": rope.get("partial_rotary_factor")}
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {**{key: value for key, value in told.items() if value is not None}, "rope_scaling": scaling, **values}


def _strange(values: Values, kind: Family) -> list[str]:
    """Return what of a config.json has no place in our architecture."""
    usual = {key: value if isinstance(value, tuple) else (value,) for key, value in kind.always.items()}
    found = [f"{key} is {values.get(key)!r}" for key, wanted in usual.items() if values.get(key) not in wanted]
    rope = values.get("rope_scaling") or {}
    if rope and (scaling := rope.get("rope_type", rope.get("type"))) != "llama3":
        found.append(f"rotary positions are scaled by {scaling!r}")
    if kind.name in ("gpt_neox", "gpt2"):
        name = values.get("hidden_act" if kind.name == "gpt_neox" else "activation_function") or "gelu"
        found += [] if name in _TANH else [f"its activation is {name!r}"]
    return found


def _unlike(shape: TransformerArchitectureConfig, kind: Family) -> list[str]:
    """Return what of `shape` a family cannot be."""
    ours = {field.ours for field in kind.fields}
    wanted = dict(kind.fixed) | {"adapter_config": None, "attention_output_bias": shape.attention_bias if kind.output_like_rest else False}
    if kind.window and shape.local_attention_window_size is not None:
        wanted["num_local_attention_heads"] = shape.num_attention_heads
    else:
        wanted["num_local_attention_heads"] = 0
    if "attention_num_kv_heads" not in ours:
        wanted |= {"attention_num_kv_heads": shape.num_attention_heads, "attention_width": shape.hidden_size}
    if "rotary_scaling" not in ours:
        wanted["rotary_scaling"] = None
    here = {"attention_output_bias": shape.output_bias, "attention_num_kv_heads": shape.kv_heads}
    pairs = {path: (here.get(path, _at(shape, path)), value) for path, value in wanted.items()}
    return [f"{path} would be {value!r} and is {_said(mine)}" for path, (mine, value) in pairs.items() if mine != value]


def _said(value: Any) -> str:
    return "set" if isinstance(value, Section) else repr(getattr(value, "value", value))


def _at(shape: TransformerArchitectureConfig, path: str) -> Any:
    return reduce(getattr, path.split("."), shape)
