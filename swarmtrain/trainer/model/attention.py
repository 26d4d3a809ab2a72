"""Causal self-attention, its keys and values shared by groups of queries (Ainslie et al. 2023, arXiv 2305.13245)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import umup
from swarmtrain.trainer.model.context import Gather
from swarmtrain.trainer.model.linear import linear
from swarmtrain.trainer.model.lora import Beside
from swarmtrain.trainer.model.masks import Masks, Mixing, mix
from swarmtrain.trainer.model.norm import norm
from swarmtrain.trainer.model.rotary import Rotation, rotate


class Attention(nn.Module):
    """Causal self-attention. The number of heads is read off the projections, which may be a shard."""

    def __init__(self, shape: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.first_head = 0
        """The number of this rank's first head, in the undivided model."""
        self.gather: Gather | None = None
        """Comes by the rest of each sequence, where this rank has a part."""
        self.head_size = shape.head_size
        self.local_heads = shape.num_local_attention_heads
        self.position_type = shape.relative_position_embedding_type
        self.dropout = shape.dropout_attention_probs
        bias, narrow, fp8 = shape.attention_bias, shape.kv_heads * shape.head_size, shape.fp8_config_attention
        self.scales = umup.attention_scales(shape) if shape.umup.enable else None
        self.query = linear(shape, shape.hidden_size, shape.attention_width, bias=bias, fp8=fp8)
        self.key = linear(shape, shape.hidden_size, narrow, bias=bias, fp8=fp8)
        self.value = linear(shape, shape.hidden_size, narrow, bias=bias, fp8=fp8)
        self.output = linear(
            shape, shape.attention_width, shape.hidden_size, bias=shape.output_bias, fp8=shape.fp8_config_attention_dense_out
        )
        layers = {"query": self.query, "key": self.key, "value": self.value, "output": self.output}
        self.lora = Beside(shape, f"{layer} attention", layers.items())
        # Henry et al. 2020 (arXiv 2010.04245), as Dehghani et al. 2023 (2302.05442) have it: scores cannot grow without bound.
        self.query_norm = norm(shape.head_size, shape) if shape.key_query_norm else None
        self.key_norm = norm(shape.head_size, shape) if shape.key_query_norm else None

    def forward(self, hidden: Tensor, *, rotation: Rotation | None, masks: Masks, noise: Tensor | None) -> Tensor:
        """For `noise`, that of all tokens of `hidden`, see Dropout."""
        layers = {"query": self.query, "key": self.key, "value": self.value}
        query, key, value = (self._heads(self.lora.of(name, layer, hidden, noise)) for name, layer in layers.items())
        if self.query_norm is not None and self.key_norm is not None:
            query, key = _normalised(query, self.query_norm), _normalised(key, self.key_norm)
        if rotation is not None:
            query, key = (rotate(heads, rotation, self.position_type) for heads in (query, key))
        if self.gather is not None:
            key, value = self.gather(key, value)
        if self.scales is None:
            mixed = self._mix(query, key, value, masks, None)
        else:
            of_scores, of_mixed = self.scales
            query, key, value = (umup.scaled(heads, 1.0, of_mixed) for heads in (query, key, value))
            mixed = umup.scaled(self._mix(query, key, value, masks, of_scores), of_mixed)
        return self.lora.of("output", self.output, mixed.transpose(1, 2).flatten(2), noise)

    def _mix(self, query: Tensor, key: Tensor, value: Tensor, masks: Masks, scale: float | None) -> Tensor:
        """Return what each head sees. The model's first heads are the local ones."""
        how = Mixing(self.dropout if self.training else 0.0, scale)
        local = min(max(0, self.local_heads - self.first_head), query.shape[1])
        if local in (0, query.shape[1]):
            return mix(query, key, value, masks.near if local else masks.all, how)
        shared = local * key.shape[1] // query.shape[1]
        near = mix(query[:, :local], key[:, :shared], value[:, :shared], masks.near, how)
        everything = mix(query[:, local:], key[:, shared:], value[:, shared:], masks.all, how)
        return torch.cat((near, everything), dim=1)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_size).transpose(1, 2)


def _normalised(heads: Tensor, by: nn.Module) -> Tensor:
    """Return `heads` normalised in float32 at least, as the stream is."""
    wide: Tensor = by(heads.to(torch.promote_types(heads.dtype, torch.float32)))
    return wide.to(heads.dtype)
