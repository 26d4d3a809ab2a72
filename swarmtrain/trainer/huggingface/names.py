"""Names of parameters in Hugging Face's families, and the one whose queries, keys and values are one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from swarmtrain.config.huggingface import Family
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig

_FUSED = ("query", "key", "value")
_OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INNER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_NEOX_OUTER = {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"}
_NEOX_INNER = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    **{f"attention.{one}": "attention.query_key_value" for one in _FUSED},
    "attention.output": "attention.dense",
    "mlp.up": "mlp.dense_h_to_4h",
    "mlp.down": "mlp.dense_4h_to_h",
}


def grouped(names: Iterable[str], family: Family) -> dict[str, list[str]]:
    """Return for each tensor there the parameters here that make it: one, or queries, keys and values."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(_theirs(name, family), []).append(name)
    return found


def joined(parts: Sequence[Tensor], shape: TransformerArchitectureConfig) -> Tensor:
    """Return the tensor there of its `parts` here: each head's query, key and value beside each other."""
    if len(parts) == 1:
        return parts[0]
    heads = torch.stack([part.reshape(shape.num_attention_heads, shape.head_size, *part.shape[1:]) for part in parts], dim=1)
    return heads.flatten(0, 2)


def part(whole: Tensor, number: int, of: int, shape: TransformerArchitectureConfig) -> Tensor:
    """Return part `number` of the `of` that `whole` was joined of."""
    if of == 1:
        return whole
    return whole.reshape(shape.num_attention_heads, of, shape.head_size, *whole.shape[1:])[:, number].flatten(0, 1)


def _theirs(name: str, family: Family) -> str:
    module, _, kind = name.rpartition(".")
    neox = family.name == "gpt_neox"
    if not module.startswith("blocks."):
        return f"{(_NEOX_OUTER if neox else _OUTER)[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"{'gpt_neox' if neox else 'model'}.layers.{layer}.{(_NEOX_INNER if neox else _INNER)[inner]}.{kind}"
