"""The mean pseudo-gradient of all learners: each learner's is encoded once, gathered on all ranks, and summed there in a fixed order.

The pseudo-gradient of a learner is the global parameters minus its own. Since every learner's is encoded, also those on this rank, and the
sum is in the order of the learners, the mean has the same bits however the learners are divided over ranks.

A pseudo-gradient is encoded unchanged, or as int8 or int4 values with one scale per block. Symmetric quantization: the scale of a block is
its largest magnitude divided by the highest level, 127 or 7, and each value is rounded to the nearest multiple of the scale. So no value
changes by more than half a scale. A NaN or Inf makes its block NaN. A block is up to 256 consecutive values of one row, which is everything
at one index of the first dimension. FSDP shards tensors by rows, so shards have the same blocks as the whole tensor. A tensor of one
dimension, whose rows are single values, is sent in float32. The bytes of a tensor are its scales, in float32, and then its levels. They are
padded to 4 bytes, so that tensors can follow each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.config.schema.optimizer import Quantization
from swarmtrain.trainer import collectives

MAX_BUCKET_ELEMENTS = 1 << 23
"""Maximum number of elements that are gathered at a time: 32 MiB of float32."""
BLOCK_SIZE = 256
"""Maximum number of values with the same scale."""
_HIGHEST_LEVEL = {Quantization.int8: 127, Quantization.int4: 7}
_ALIGNMENT = 4
_QUANTIZED_DIMENSIONS = 2
"""Least number of dimensions of the tensors that are quantized."""
_INT4_OFFSET = 8
"""Added to int4 levels, -7 to 7, so that they are positive."""


class PseudoGradientExchange:
    """Computes mean pseudo-gradients. Every rank has the same."""

    def __init__(self, learners_by_group: Sequence[range], group: dist.ProcessGroup | None, quantization: Quantization) -> None:
        """`learners_by_group`: the learners of each learner group. `group`: process group with one rank of each, in order; None for one."""
        self._learners_by_group, self._group, self._quantization = learners_by_group, group, quantization

    def compute_bytes_per_learner(self, parameters: Mapping[str, Tensor]) -> int:
        """Return the number of bytes that each learner contributes to the mean pseudo-gradient of `parameters`."""
        return sum(compute_encoded_size(each.shape, each.dtype, self._quantization) for each in parameters.values())

    @torch.no_grad()
    def start(self, pseudo_gradients: Sequence[Mapping[str, Tensor]]) -> PendingMean:
        """Start to gather the pseudo-gradients of all learners, given those of this rank's learners by parameter name. Collective."""
        local = [torch.cat([encode_tensor(each, self._quantization) for each in learner.values()]) for learner in pseudo_gradients]
        like = pseudo_gradients[0]
        if self._group is None:
            return PendingMean(local, (), like, self._quantization)
        most = max(map(len, self._learners_by_group))
        stacked = torch.stack([*local, *[torch.zeros_like(local[0])] * (most - len(local))])
        gathered = stacked.new_empty((len(self._learners_by_group), *stacked.shape))
        pieces = torch.split(stacked.flatten(), collectives.MESSAGE_BYTES)
        outputs = torch.split(gathered.flatten(1), collectives.MESSAGE_BYTES, dim=1)
        works = [
            dist.all_gather(list(output.unbind()), piece, group=self._group, async_op=True)
            for output, piece in zip(outputs, pieces, strict=True)
        ]
        encoded = [rows[index] for rows, learners in zip(gathered, self._learners_by_group, strict=True) for index in range(len(learners))]
        return PendingMean(encoded, works, like, self._quantization)


@dataclass(frozen=True)
class PendingMean:
    """A mean pseudo-gradient whose parts are being gathered."""

    encoded: Sequence[Tensor]
    """The bytes of each learner, in the order of the learners. They are valid once `works` are complete."""
    works: Sequence[dist.Work]
    """The collectives that gather the bytes; none if this rank has all learners."""
    like: Mapping[str, Tensor]
    """A tensor with the shape and type of each pseudo-gradient, by parameter name."""
    quantization: Quantization

    @torch.no_grad()
    def wait(self) -> dict[str, Tensor]:
        """Wait until all parts are gathered, and return the mean by parameter name."""
        for work in self.works:
            work.wait()
        means, start = {}, 0
        for name, like in self.like.items():
            end = start + compute_encoded_size(like.shape, like.dtype, self.quantization)
            total = torch.zeros_like(like)
            for each in self.encoded:
                total += decode_tensor(each[start:end], like.shape, like.dtype, self.quantization)
            means[name], start = total.div_(len(self.encoded)), end
        return means


def divide_into_buckets(parameters: Mapping[str, Tensor], max_elements: int) -> list[list[str]]:
    """Return the names of consecutive parameters that are gathered together. A parameter of more elements has a bucket of its own."""
    buckets: list[list[str]] = []
    count = 0
    for name, parameter in parameters.items():
        if not buckets or count + parameter.numel() > max_elements:
            buckets.append([])
            count = 0
        buckets[-1].append(name)
        count += parameter.numel()
    return buckets


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
