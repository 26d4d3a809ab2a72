"""What tensors are called and how they lie in Hugging Face's families: three of ours can be one there, and some are turned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmtrain.config.huggingface import Family
from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig

_FUSED = ("query", "key", "value")
_COMPUTED = ("inv_freq", ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias")


@dataclass(frozen=True)
class _Names:
    """What parts of a model are called, by our names."""

    outer: Mapping[str, str]
    layers: str
    inner: Mapping[str, str]


_MODERN = _Names(
    {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    "model.layers",
    {
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
    },
)
_OTHERS = {
    "gpt_neox": _Names(
        {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        "gpt_neox.layers",
        {
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            **{f"attention.{one}": "attention.query_key_value" for one in _FUSED},
            "attention.output": "attention.dense",
            "mlp.up": "mlp.dense_h_to_4h",
            "mlp.down": "mlp.dense_4h_to_h",
        },
    ),
    "gpt2": _Names(
        {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h",
        {
            "attention_norm": "ln_1",
            "mlp_norm": "ln_2",
            **{f"attention.{one}": "attn.c_attn" for one in _FUSED},
            "attention.output": "attn.c_proj",
            "mlp.up": "mlp.c_fc",
            "mlp.down": "mlp.c_proj",
        },
    ),
}


class Tensors:
    """The tensors of a family's model of some shape, and how each is made of ours and ours of it."""

    def __init__(self, kind: Family, shape: TransformerArchitectureConfig, sizes: Mapping[str, Sequence[int]]) -> None:
        """`sizes` has those of our parameters, by name."""
        self._names, self._shape, self._sizes = _OTHERS.get(kind.name, _MODERN), shape, sizes
        self._by_head, self._turns = kind.name == "gpt_neox", kind.name == "gpt2"
        self.made_of: dict[str, list[str]] = {}
        """Of each tensor there the parameters here that make it: one, or queries, keys and values."""
        for name in sizes:
            self.made_of.setdefault(self._theirs(name), []).append(name)
        self._places = {name: (theirs, number) for theirs, ours in self.made_of.items() for number, name in enumerate(ours)}

    @property
    def base(self) -> str:
        """What the names of all tensors but the head's begin with."""
        return self._names.layers.partition(".")[0] + "."

    @property
    def head(self) -> str:
        """The name of the head's weight, which is not wanted where it is the embedding's."""
        return f"{self._names.outer['head']}.weight"

    @property
    def positions(self) -> str | None:
        """The name of learned positions, of which there may be more than samples have."""
        return next((theirs for theirs, ours in self.made_of.items() if ours == ["positions.weight"]), None)

    def alone(self, name: str) -> str | None:
        """Return the tensor there that is parameter `name` as it is here; None if it is made of others too, or turned."""
        theirs, _ = self._places[name]
        return theirs if len(self.made_of[theirs]) == 1 and not self._turned(theirs) else None

    def size(self, theirs: str) -> tuple[int, ...]:
        """Return the size of a tensor there."""
        first, *rest = zip(*(self._sizes[name] for name in self.made_of[theirs]), strict=True)
        whole = (sum(first), *(dimension[0] for dimension in rest))
        return whole[::-1] if self._turned(theirs) else whole

    def join(self, theirs: str, parts: Sequence[Tensor]) -> Tensor:
        """Return a tensor there of ours."""
        if self._by_head and len(parts) > 1:
            heads, size = self._shape.num_attention_heads, self._shape.head_size
            return torch.stack([part.reshape(heads, size, *part.shape[1:]) for part in parts], dim=1).flatten(0, 2)
        whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        return whole.T if self._turned(theirs) else whole

    def part(self, name: str, found: Mapping[str, Tensor]) -> Tensor:
        """Return parameter `name` of the tensors `found` there: a view, where that can be."""
        theirs, number = self._places[name]
        whole, of = found[theirs], len(self.made_of[theirs])
        if self._by_head and of > 1:
            size = self._shape.head_size
            return whole.reshape(self._shape.num_attention_heads, of, size, *whole.shape[1:])[:, number].flatten(0, 1)
        whole = whole.T if self._turned(theirs) else whole
        return whole.chunk(of)[number][: self._sizes[name][0]]

    def _turned(self, theirs: str) -> bool:
        """Return whether rows there are columns here."""
        return self._turns and theirs.startswith(self._names.layers) and len(self._sizes[self.made_of[theirs][0]]) > 1

    def _theirs(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        if not module.startswith("blocks."):
            return f"{self._names.outer[module]}.{kind}"
        _, layer, inner = module.split(".", 2)
        return f"{self._names.layers}.{layer}.{self._names.inner[inner]}.{kind}"


def parameters(names: Iterable[str]) -> list[str]:
    """Return those of `names` that are no tensors that are computed, and were saved all the same."""
    return [name for name in names if not name.endswith(_COMPUTED)]
