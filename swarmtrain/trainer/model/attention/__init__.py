"""Causal self-attention with grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).

visibility        which tokens attend to which
attention_method  the interface of attention methods
selection         the choice of a method
dense             torch's scaled_dot_product_attention, without or with a mask
varlen            flash attention on documents and windows
flex              flex attention, and its masks of blocks
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from swarmtrain.config.schema.transformer_architecture import TransformerArchitectureConfig
from swarmtrain.trainer.model import umup
from swarmtrain.trainer.model.attention.attention_method import AttentionOptions
from swarmtrain.trainer.model.attention.selection import AttentionMethods
from swarmtrain.trainer.model.layers import build_linear, build_norm
from swarmtrain.trainer.model.peft import LoraAdapters
from swarmtrain.trainer.model.positions import Rotation, apply_rotary_embedding
from swarmtrain.trainer.model.sequence_shard import KeyValueGather


class Attention(nn.Module):
    """Causal self-attention layer. The number of heads is inferred from the projections, which may be tensor-parallel shards."""

    def __init__(self, architecture: TransformerArchitectureConfig, layer: int) -> None:
        super().__init__()
        self.first_head = 0
        """Index in the full model of this rank's first attention head."""
        self.gather_key_value: KeyValueGather | None = None
        """Function that gathers the keys and values of the full sequence (context parallelism); None without context parallelism."""
        self.head_size = architecture.head_size
        self.num_local_attention_heads = architecture.count_local_heads(layer)
        self.position_type = architecture.relative_position_embedding_type
        self.dropout, self.softcap = architecture.dropout_attention_probs, architecture.attention_softcap
        bias, key_value_width, fp8 = (
            architecture.attention_bias,
            architecture.kv_heads * architecture.head_size,
            architecture.fp8_config_attention,
        )
        self.umup_scales = umup.compute_attention_scales(architecture) if architecture.umup.enable else None
        self.query = build_linear(architecture, architecture.hidden_size, architecture.attention_width, bias=bias, fp8=fp8)
        self.key = build_linear(architecture, architecture.hidden_size, key_value_width, bias=bias, fp8=fp8)
        self.value = build_linear(architecture, architecture.hidden_size, key_value_width, bias=bias, fp8=fp8)
        self.output = build_linear(
            architecture,
            architecture.attention_width,
            architecture.hidden_size,
            bias=architecture.has_attention_output_bias,
            fp8=architecture.fp8_config_attention_dense_out,
        )
        projections = {"query": self.query, "key": self.key, "value": self.value, "output": self.output}
        self.lora = LoraAdapters(architecture, f"{layer} attention", projections.items())
        # QK norm bounds the attention scores: Henry et al. 2020 (arXiv 2010.04245), in the form of Dehghani et al. 2023 (arXiv 2302.05442).
        self.query_norm = build_norm(architecture.head_size, architecture) if architecture.key_query_norm else None
        self.key_norm = build_norm(architecture.head_size, architecture) if architecture.key_query_norm else None

    def forward(self, hidden: Tensor, *, rotation: Rotation | None, methods: AttentionMethods, noise: Tensor | None) -> Tensor:
        """Return the attention output (batch, sequence, hidden size).

        `noise` (batch, sequence): the dropout noise of the tokens in `hidden`, see Dropout.
        """
        projections = {"query": self.query, "key": self.key, "value": self.value}
        query, key, value = (
            self._split_heads(self.lora.forward_with_lora(name, layer, hidden, noise)) for name, layer in projections.items()
        )
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = (apply_rotary_embedding(heads, rotation, self.position_type) for heads in (query, key))
        if self.gather_key_value is not None:
            key, value = self.gather_key_value(key, value)
        if self.umup_scales is None:
            attended = self._compute_attention(query, key, value, methods, None)
        else:
            score_scale, output_scale = self.umup_scales
            query, key, value = (umup.scale_values_and_gradients(heads, 1.0, output_scale) for heads in (query, key, value))
            attended = umup.scale_values_and_gradients(self._compute_attention(query, key, value, methods, score_scale), output_scale)
        return self.lora.forward_with_lora("output", self.output, attended.transpose(1, 2).flatten(2), noise)

    def _compute_attention(self, query: Tensor, key: Tensor, value: Tensor, methods: AttentionMethods, scale: float | None) -> Tensor:
        """Return the attention output of each head (batch, head, sequence, head size).

        The first `num_local_attention_heads` heads of the full model use local (sliding-window) attention.
        """
        options = AttentionOptions(self.dropout if self.training else 0.0, scale, self.softcap)
        num_local_heads = min(max(0, self.num_local_attention_heads - self.first_head), query.shape[1])
        if num_local_heads in (0, query.shape[1]):
            return (methods.local if num_local_heads else methods.full).compute(query, key, value, options)
        num_local_key_heads = num_local_heads * key.shape[1] // query.shape[1]
        local_output = methods.local.compute(
            query[:, :num_local_heads], key[:, :num_local_key_heads], value[:, :num_local_key_heads], options
        )
        full_output = methods.full.compute(
            query[:, num_local_heads:], key[:, num_local_key_heads:], value[:, num_local_key_heads:], options
        )
        return torch.cat((local_output, full_output), dim=1)

    def _split_heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_size).transpose(1, 2)
