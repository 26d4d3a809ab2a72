"""Sums of gradients over replicas in which only bfloat16 values are sent.

Each replica rounds its own gradients, which it has summed over its micro batches, to bfloat16, to the nearest value, ties to even. The
rounded gradients of all replicas are added in float32, in the order of the ranks, and the sum is rounded to bfloat16. So a value is rounded
twice, whatever the number of replicas. An all-reduce of bfloat16 values, as in torch's bf16_compress_hook, rounds after each addition, and
sends as many bytes. (DDP refuses that hook on gloo.)

Each rank adds a part of the values of all ranks, and sends the sums to all ranks. The first collectives are started while the backward pass
runs, the second ones at its end, so that all ranks start their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.trainer.collectives import MESSAGE_BYTES

_PART_ELEMENTS = MESSAGE_BYTES // torch.bfloat16.itemsize
"""Maximum number of values that a rank sends to another one at a time."""


class Bfloat16Compression:
    """Sums gradients over the ranks of a group in bfloat16. It has no state between steps."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.is_active = False
        self._group = group
        self._pending: list[_PendingSum] = []

    def start_step(self, number: int) -> None:
        """Compress gradients, as in each step."""
        self.is_active = True

    def start_sum(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Round `gradients`, and begin to send to each rank the part that it adds."""
        targets, rank_count = [gradient.flatten() for gradient in gradients.values()], self._group.size()
        size = sum(target.numel() for target in targets)
        rounded = torch.empty(-(-size // rank_count) * rank_count, dtype=torch.bfloat16, device=targets[0].device)
        rounded[size:] = 0
        torch._foreach_copy_(_split_like(rounded, targets), targets)
        pieces = [_Piece(piece, torch.empty_like(piece)) for piece in torch.split(rounded, _PART_ELEMENTS * rank_count)]
        works = [dist.all_to_all_single(piece.received, piece.rounded, group=self._group, async_op=True) for piece in pieces]
        self._pending.append(_PendingSum(list(gradients.values()), rounded, pieces, works))

    def finish_sums(self) -> None:
        """Add the values that this rank has received, and replace all gradients with the sums of all ranks."""
        for pending in self._pending:
            for index, piece in enumerate(pending.pieces):
                pending.works[index].wait()
                parts = piece.received.view(self._group.size(), -1)
                total = parts[0].float()
                for part in parts[1:]:
                    total += part
                parts.copy_(total)  # rounded, once for each rank
                pending.works[index] = dist.all_to_all_single(piece.rounded, piece.received, group=self._group, async_op=True)
        for pending in self._pending:
            for work in pending.works:
                work.wait()
            for gradient, values in zip(pending.gradients, _split_like(pending.rounded, pending.gradients), strict=True):
                gradient.copy_(values.view_as(gradient))
        self._pending.clear()

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return an empty dict."""
        return {}

    def reset_state(self) -> None:
        """Do nothing."""


class _Piece(NamedTuple):
    """Values that are added at the same time, as many by each rank."""

    rounded: Tensor
    """The values of this rank; later the sums of all ranks."""
    received: Tensor
    """One part of the values of each rank, in the order of the ranks; later its sum, once for each rank."""


class _PendingSum(NamedTuple):
    gradients: Sequence[Tensor]
    rounded: Tensor
    """The values of all pieces: the gradients, padded to a multiple of the number of ranks."""
    pieces: Sequence[_Piece]
    works: list[dist.Work]
    """The newest collective of each piece."""


def _split_like(values: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the one-dimensional `values`, one after another, each with as many elements as one of `tensors`."""
    sizes = [tensor.numel() for tensor in tensors]
    return list(torch.split(values[: sum(sizes)], sizes))
