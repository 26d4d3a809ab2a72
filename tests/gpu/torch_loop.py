"""The yardstick: a Llama-like model in a training loop that uses only torch, as short and as fast as a careful user would write it.

It has the same shapes and sums the same loss as swarmtrain's. The parameters are float32; they are cast to bfloat16 once per step. Each
block is compiled, and so are the output layer and the loss. AdamW is fused, gradients are clipped by their norm, and the loss is read once
per step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_LEARNING_RATE, _BETAS, _CLIPPING = 1e-4, (0.9, 0.95), 1.0


class Block(nn.Module):
    """One transformer block: attention with rotary position embeddings, then SwiGLU."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, mlp_size: int) -> None:
        super().__init__()
        self.head_size, self.uses_gqa = hidden_size // heads, kv_heads != heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden_size, eps=1e-5), nn.RMSNorm(hidden_size, eps=1e-5)
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, kv_heads * self.head_size, bias=False)
        self.value = nn.Linear(hidden_size, kv_heads * self.head_size, bias=False)
        self.output = nn.Linear(hidden_size, hidden_size, bias=False)
        self.gate, self.up = nn.Linear(hidden_size, mlp_size, bias=False), nn.Linear(hidden_size, mlp_size, bias=False)
        self.down = nn.Linear(mlp_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        normed = self.attention_norm(hidden)
        query, key, value = (
            layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.uses_gqa)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))  # type: ignore[no-any-return]  # of modules


class Model(nn.Module):
    """A decoder-only transformer that returns the summed loss."""

    def __init__(self, shape: Mapping[str, Any]) -> None:
        super().__init__()
        hidden_size, heads = shape["hidden_size"], shape["num_attention_heads"]
        kv_heads, mlp_size = shape.get("attention_num_kv_heads") or heads, int(hidden_size * shape["mlp_factor"])
        self.embedding = nn.Embedding(shape["vocab_size"], hidden_size)
        self.blocks = nn.ModuleList(Block(hidden_size, heads, kv_heads, mlp_size) for _ in range(shape["num_layers"]))
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.head = nn.Linear(hidden_size, shape["vocab_size"], bias=False)
        half = hidden_size // heads // 2
        angles = torch.outer(torch.arange(shape["sequence_length"]), 10000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cosine", angles.cos().to(torch.bfloat16))
        self.register_buffer("sine", angles.sin().to(torch.bfloat16))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, self.cosine, self.sine)
        return self.compute_loss(hidden, targets)

    def compute_loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the summed cross-entropy of `hidden`, the output of the last block."""
        logits = self.head(self.norm(hidden)).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten(), reduction="sum")


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


def measure(
    shape: Mapping[str, Any], batch_size: int, *, steps: int, warmup_steps: int, device_type: str, compiled: bool
) -> dict[str, Any]:
    """Train for `warmup_steps` + `steps` steps, and return the median step time, the peak memory and the first and last loss."""
    torch.manual_seed(1)
    with torch.device(device_type):
        masters = [parameter.detach() for parameter in Model(shape).parameters()]
        model = Model(shape).bfloat16()
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward, dynamic=False)
        model.compute_loss = torch.compile(model.compute_loss, dynamic=False)  # type: ignore[method-assign]
    weights: list[Tensor] = list(model.parameters())
    gradients = [torch.zeros_like(master) for master in masters]
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, lr=_LEARNING_RATE, betas=_BETAS, fused=True)
    length, durations, losses = shape["sequence_length"], [], []
    batches = torch.randint(shape["vocab_size"], (4, batch_size, length + 1))
    for step in range(warmup_steps + steps):
        start_time = time.perf_counter()
        batch = batches[step % len(batches)].to(device_type, non_blocking=True)
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        loss = model(batch[:, :-1], batch[:, 1:]) / (batch_size * length)
        loss.backward()
        torch._foreach_copy_(gradients, [weight.grad for weight in weights if weight.grad is not None])
        torch.nn.utils.clip_grad_norm_(masters, _CLIPPING)
        optimizer.step()
        for weight in weights:
            weight.grad = None
        losses.append(loss.item())
        if device_type == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start_time)
    values = {"step_seconds": median(durations[warmup_steps:]), "first_loss": losses[0], "last_loss": losses[-1]}
    if device_type == "cuda":
        values["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {**values, "parameters": sum(weight.numel() for weight in weights)}
