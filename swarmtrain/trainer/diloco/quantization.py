"""Pseudo-gradients as bytes: unchanged, or as int8 or int4 values with one scale per block.

Symmetric quantization: the scale of a block is its largest magnitude divided by the highest level, 127 or 7, and each value is rounded to
the nearest multiple of the scale. So no value changes by more than half a scale. A NaN or Inf makes its block NaN.

A block is up to 256 consecutive values of one row, which is everything at one index of the first dimension. FSDP shards tensors by rows, so
shards have the same blocks as the whole tensor. A tensor of one dimension, whose rows are single values, is sent in float32.

The bytes of a tensor are its scales, in float32, and then its levels. They are padded to 4 bytes, so that tensors can follow each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmtrain.config.schema.optimizer import Quantization

BLOCK_SIZE = 256
"""Maximum number of values with the same scale."""
_HIGHEST_LEVEL = {Quantization.int8: 127, Quantization.int4: 7}
_ALIGNMENT = 4
_QUANTIZED_DIMENSIONS = 2
"""Least number of dimensions of the tensors that are quantized."""
_INT4_OFFSET = 8
"""Added to int4 levels, -7 to 7, so that they are positive."""


def compute_encoded_size(shape: torch.Size, dtype: torch.dtype, quantization: Quantization) -> int:
    """Return the number of bytes into which `encode_tensor` encodes a tensor of `shape` and type `dtype`."""
    count = shape.numel()
    if quantization is Quantization.none:
        return count * dtype.itemsize
    if len(shape) < _QUANTIZED_DIMENSIONS:
        return count * torch.float32.itemsize
    level_bytes = count if quantization is Quantization.int8 else _divide_up(count, 2)
    return shape[0] * _count_blocks_per_row(shape) * torch.float32.itemsize + _divide_up(level_bytes, _ALIGNMENT) * _ALIGNMENT


def encode_tensor(values: Tensor, quantization: Quantization) -> Tensor:
    """Return `values`, a tensor of any shape, as a vector of bytes (uint8)."""
    if quantization is Quantization.none:
        return values.flatten().view(torch.uint8)
    if values.dim() < _QUANTIZED_DIMENSIONS:
        return values.float().flatten().view(torch.uint8)
    highest, rows = _HIGHEST_LEVEL[quantization], values.float().flatten(1)
    padded_length = _count_blocks_per_row(values.shape) * BLOCK_SIZE
    blocks = _pad(rows, padded_length).view(-1, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=1) / highest
    divisors = torch.where(scales == 0, 1.0, scales)
    levels = (blocks / divisors[:, None]).round_().clamp_(-highest, highest).view(-1, padded_length)[:, : rows.shape[1]].flatten()
    if quantization is Quantization.int8:
        encoded_levels = levels.to(torch.int8).view(torch.uint8)
    else:
        low, high = _pad((levels + _INT4_OFFSET).to(torch.uint8), _divide_up(len(levels), 2) * 2).view(-1, 2).unbind(dim=1)
        encoded_levels = low | high << 4
    return torch.cat([scales.view(torch.uint8), _pad(encoded_levels, _divide_up(len(encoded_levels), _ALIGNMENT) * _ALIGNMENT)])


def decode_tensor(encoded: Tensor, shape: torch.Size, dtype: torch.dtype, quantization: Quantization) -> Tensor:
    """Return the tensor of `shape` and type `dtype` that `encode_tensor` has encoded as `encoded`."""
    if quantization is Quantization.none:
        return encoded.view(dtype).view(shape)
    if len(shape) < _QUANTIZED_DIMENSIONS:
        return encoded.view(torch.float32).to(dtype).view(shape)
    count, blocks_per_row = shape.numel(), _count_blocks_per_row(shape)
    scale_bytes = shape[0] * blocks_per_row * torch.float32.itemsize
    scales, encoded_levels = encoded[:scale_bytes].view(torch.float32), encoded[scale_bytes:]
    if quantization is Quantization.int8:
        levels = encoded_levels.view(torch.int8).float()
    else:
        levels = torch.stack([encoded_levels & 15, encoded_levels >> 4], dim=1).flatten().float() - _INT4_OFFSET
    rows = levels[:count].view(shape).flatten(1)
    row_scales = scales.view(-1, blocks_per_row).repeat_interleave(BLOCK_SIZE, dim=1)[:, : rows.shape[1]]
    return (rows * row_scales).to(dtype).view(shape)


def _count_blocks_per_row(shape: torch.Size) -> int:
    return _divide_up(shape[1:].numel(), BLOCK_SIZE)


def _divide_up(count: int, divisor: int) -> int:
    return -(-count // divisor)


def _pad(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - values.shape[-1]))
