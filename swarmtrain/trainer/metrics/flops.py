"""Floating point operations of a model, counted as torchtitan and nanochat count them, so that figures can be compared.

A number that multiplies costs two operations a token on the way there and four on the way back: 6 N. Attention costs
12 × layers × width × sequence length beside that, as if every token saw the whole sequence; causal attention needs half.
What is computed again (activation checkpointing) does not count: it is no work of the model's.
"""

from __future__ import annotations

from swarmtrain.config.transformer_architecture import TransformerArchitectureConfig


def per_token(shape: TransformerArchitectureConfig, parameters: int) -> int:
    """Return the operations of one token's forward and backward pass through a model of `shape` with `parameters` numbers in all."""
    looked_up = 0 if shape.weight_tying else shape.vocab_size * shape.hidden_size
    width = shape.num_attention_heads * shape.head_size
    return 6 * (parameters - looked_up) + 12 * shape.num_layers * width * shape.sequence_length
