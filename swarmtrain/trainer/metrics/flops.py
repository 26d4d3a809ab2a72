"""Floating point operations of a model, counted as torchtitan and nanochat count them, so that figures can be compared.

A number that multiplies costs two operations a token on the way there and four on the way back: 6 N. Attention costs
12 × layers × width × sequence length beside that, as if every token saw the whole sequence; causal attention needs half.
What is computed again (activation checkpointing) does not count: it is no work of the model's.
"""

from __future__ import annotations

import re

from swarmtrain.config.transformer_architecture import Precision, TransformerArchitectureConfig

# 10^12 operations a second of matrices of bfloat16, without sparsity, sums in float32, by the makers' data sheets. Where one
# name is a part of another, the longer one comes first.
_PEAKS = {
    "MI355X": 2500.0,
    "MI325X": 1307.4,
    "MI300X": 1307.4,
    "MI300A": 980.6,
    "MI250X": 191.5,  # a die of two, which torch takes for a device
    "MI210": 181.0,
    "GB300": 2500.0,
    "GB200": 2500.0,
    "B300": 2250.0,
    "B200": 2250.0,
    "GH200": 989.4,
    "H200": 989.4,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.5,
    "H100": 989.4,
    "H800": 989.4,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10G": 70.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 6000 Ada": 364.2,
    "RTX A6000": 154.8,
    "RTX 5090": 209.5,
    "RTX 5080": 112.6,
    "RTX 4090": 165.2,
    "RTX 4080": 97.5,
    "RTX 3090": 71.0,
}
_NARROW = (Precision.bfloat16, Precision.float16)


def per_token(shape: TransformerArchitectureConfig, parameters: int) -> int:
    """Return the operations of one token's forward and backward pass through a model of `shape` with `parameters` numbers in all."""
    looked_up = 0 if shape.tied else shape.vocab_size * shape.hidden_size
    looked_up += shape.sequence_length * shape.hidden_size if shape.learned_positions else 0
    return 6 * (parameters - looked_up) + 12 * shape.num_layers * shape.attention_width * shape.sequence_length


def peak(device: str, precision: Precision) -> float | None:
    """Return the most operations a second of a device with the name that its driver gives it; None if that is not known.

    Of float8 it is that of bfloat16, as others count: what is gained shows. Of float32 it depends on whether matrices are
    rounded to TF32, and is not told.
    """
    if precision not in _NARROW:
        return None
    return next((tera * 1e12 for name, tera in _PEAKS.items() if re.search(rf"\b{re.escape(name)}(?![0-9])", device)), None)
