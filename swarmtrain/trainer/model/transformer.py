"""A decoder-only transformer: rotary positions, causal attention, pre-normalisation, no biases.

Rotary positions: Su et al. 2021 (arXiv 2104.09864). SwiGLU: Shazeer 2020 (2002.05202). Grouped queries: Ainslie et al. 2023 (2305.13245).
Each parameter is drawn from a generator seeded by (seed, its name), so that its values depend neither on the order in
which modules are made nor on how the model is divided afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmtrain.config.transformer_architecture import MlpType, NormType, TransformerArchitectureConfig
from swarmtrain.trainer.runtime import derived_seed

IGNORE = -1
"""Target of a position that has none: it counts neither in the loss nor in the number of tokens."""
_DEVIATION = 0.02


class Transformer(nn.Module):
    """Maps tokens (batch, sequence) to logits (batch, sequence, vocabulary)."""

    def __init__(self, shape: TransformerArchitectureConfig, seed: int) -> None:
        super().__init__()
        self.tied = shape.weight_tying
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = _norm(shape)
        self.head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.loss: nn.Module = Loss()
        if self.tied:
            self.head.weight = self.embedding.weight
        _initialise(self, shape, seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return the logits; or, given `targets` (batch, sequence; IGNORE where there is none), the summed loss in nats.

        `documents` (batch, sequence) has the number of each token's document, where the model is to tell them apart.
        If the head is divided over ranks, the logits are those of this rank's part of the vocabulary.
        """
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        if targets is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss: Tensor = self.loss(logits.flatten(0, 1), targets.flatten())
        return loss


class Loss(nn.Module):
    """Maps logits (tokens, vocabulary) and targets (tokens) to the summed loss in nats."""

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


class Block(nn.Module):
    """Attention and a feed-forward network, each beside the residual stream."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(shape)
        self.attention = Attention(shape)
        self.mlp_norm = _norm(shape)
        self.mlp = SwiGlu(shape) if shape.mlp_type is MlpType.swiglu else Mlp(shape)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        mixed: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return mixed


class Attention(nn.Module):
    """Causal self-attention. The number of heads is read off the projections, which may be a shard."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        self.head_size = shape.hidden_size // shape.num_attention_heads
        self.queries_per_key = shape.num_attention_heads // shape.kv_heads
        self.query = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.key = nn.Linear(shape.hidden_size, shape.kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(shape.hidden_size, shape.kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        cosine, sine = _rotations(shape.sequence_length, self.head_size, shape.rotary_embedding_base)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        query = self._rotate(self._heads(self.query(hidden)))
        key = self._rotate(self._heads(self.key(hidden)))
        value = self._heads(self.value(hidden))
        if self.queries_per_key > 1:
            key = key.repeat_interleave(self.queries_per_key, dim=1)
            value = value.repeat_interleave(self.queries_per_key, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return projected

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(*projected.shape[:-1], -1, self.head_size).transpose(1, 2)

    def _rotate(self, heads: Tensor) -> Tensor:
        length = heads.shape[-2]
        first, second = heads.chunk(2, dim=-1)
        cosine, sine = self.get_buffer("cosine")[:length].to(heads.dtype), self.get_buffer("sine")[:length].to(heads.dtype)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Mlp(nn.Module):
    """Two matrices with a GELU between them."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        width = int(shape.hidden_size * shape.mlp_factor)
        self.up = nn.Linear(shape.hidden_size, width, bias=False)
        self.down = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(functional.gelu(self.up(hidden)))
        return projected


class SwiGlu(nn.Module):
    """A gated feed-forward network: three matrices."""

    def __init__(self, shape: TransformerArchitectureConfig) -> None:
        super().__init__()
        width = int(shape.hidden_size * shape.mlp_factor)
        self.gate = nn.Linear(shape.hidden_size, width, bias=False)
        self.up = nn.Linear(shape.hidden_size, width, bias=False)
        self.down = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        projected: Tensor = self.down(functional.silu(self.gate(hidden)) * self.up(hidden))
        return projected


def _norm(shape: TransformerArchitectureConfig) -> nn.Module:
    if shape.norm_type is NormType.rms:
        return nn.RMSNorm(shape.hidden_size, eps=1e-5)
    return nn.LayerNorm(shape.hidden_size, bias=False)


def _rotations(length: int, head_size: int, base: int) -> tuple[Tensor, Tensor]:
    frequencies = base ** -(torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


@torch.no_grad()
def _initialise(model: Transformer, shape: TransformerArchitectureConfig, seed: int) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1)
            continue
        generator = torch.Generator().manual_seed(derived_seed(seed, name))
        into_stream = name.endswith(("attention.output.weight", "mlp.down.weight"))
        # Each block adds twice to the residual stream; scaled so, its variance does not grow with depth (GPT-2).
        parameter.normal_(0, _DEVIATION / (2 * shape.num_layers) ** 0.5 if into_stream else _DEVIATION, generator=generator)
