"""Pseudo-gradients as bytes: unchanged, or as int8 or int4 values with one scale per block.

Symmetric quantization: the scale of a block is its largest magnitude divided by the highest level, 127 or 7, and each value is rounded to
the nearest multiple of the scale. So no value changes by more than half a scale. A NaN or Inf makes its block NaN.

The bytes of a tensor are its scales, in float32, and then its levels. They are padded to 4 bytes, so that tensors can follow each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmtrain.config.schema.optimizer import Quantization

BLOCK_SIZE = 256
"""Number of values with the same scale."""
_HIGHEST_LEVEL = {Quantization.int8: 127, Quantization.int4: 7}
_ALIGNMENT, _SCALE_BYTES = 4, 4
_INT4_OFFSET = 8
"""Added to int4 levels, -7 to 7, so that they are positive."""


def compute_encoded_size(count: int, dtype: torch.dtype, quantization: Quantization) -> int:
    """Return the number of bytes of `count` values of type `dtype` that `encode_tensor` returns."""
    if quantization is Quantization.none:
        return count * dtype.itemsize
    level_bytes = count if quantization is Quantization.int8 else _divide_up(count, 2)
    return _divide_up(count, BLOCK_SIZE) * _SCALE_BYTES + _divide_up(level_bytes, _ALIGNMENT) * _ALIGNMENT


def encode_tensor(values: Tensor, quantization: Quantization) -> Tensor:
    """Return `values`, a tensor of any shape, as a vector of bytes (uint8)."""
    values = values.flatten()
    if quantization is Quantization.none:
        return values.view(torch.uint8)
    count, highest = len(values), _HIGHEST_LEVEL[quantization]
    blocks = _pad(values.float(), _divide_up(count, BLOCK_SIZE) * BLOCK_SIZE).view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=1) / highest
    divisors = torch.where(scales == 0, 1.0, scales)
    levels = (blocks / divisors[:, None]).round_().clamp_(-highest, highest).flatten()[:count]
    if quantization is Quantization.int8:
        encoded_levels = levels.to(torch.int8).view(torch.uint8)
    else:
        low, high = _pad((levels + _INT4_OFFSET).to(torch.uint8), _divide_up(count, 2) * 2).view(-1, 2).unbind(dim=1)
        encoded_levels = low | high << 4
    return torch.cat([scales.view(torch.uint8), _pad(encoded_levels, _divide_up(len(encoded_levels), _ALIGNMENT) * _ALIGNMENT)])


def decode_tensor(encoded: Tensor, shape: torch.Size, dtype: torch.dtype, quantization: Quantization) -> Tensor:
    """Return the tensor of `shape` and type `dtype` that `encode_tensor` has encoded as `encoded`."""
    if quantization is Quantization.none:
        return encoded.view(dtype).view(shape)
    count = shape.numel()
    scale_bytes = _divide_up(count, BLOCK_SIZE) * _SCALE_BYTES
    scales, encoded_levels = encoded[:scale_bytes].view(torch.float32), encoded[scale_bytes:]
    if quantization is Quantization.int8:
        levels = encoded_levels.view(torch.int8).float()
    else:
        levels = torch.stack([encoded_levels & 15, encoded_levels >> 4], dim=1).flatten().float() - _INT4_OFFSET
    return (levels[:count] * scales.repeat_interleave(BLOCK_SIZE)[:count]).to(dtype).view(shape)


def _divide_up(count: int, divisor: int) -> int:
    return -(-count // divisor)


def _pad(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)))
