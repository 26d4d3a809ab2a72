"""Context parallelism: each rank has a part of every sequence, and gathers the keys and values of the full sequence for attention.

All other layers process each token independently and need no communication. A token attends to all tokens before it, so later tokens cost
more. Rank i therefore has chunk i from the start of the sequence and chunk i from its end, which balances the work.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.differentiable_collectives import RankGroup, gather_parts

_SEQUENCE_DIM = 2
"""The sequence dimension of heads (batch, head, sequence, dimension)."""


class ContextParallelGroup:
    """Assigns the positions of each sequence to the ranks of a one-dimensional mesh, and gathers their keys and values."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.size = mesh.size()
        self._group, self._rank = RankGroup.from_process_group(mesh.get_group()), mesh.get_local_rank()

    def select_ranges(self, length: int) -> tuple[range, ...]:
        """Return the positions of this rank's tokens in sequences of `length` tokens: a chunk from the start and one from the end.

        `length` must be a multiple of twice the group size.
        """
        size, last = length // (2 * self.size), 2 * self.size - 1
        return tuple(range(chunk * size, (chunk + 1) * size) for chunk in (self._rank, last - self._rank))

    def gather_key_value(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (batch, head, sequence, head size) of the full sequence.

        In the backward pass, gradients are summed over ranks, and each rank receives the gradients of its own part.
        """
        return self._gather_sequence(key), self._gather_sequence(value)

    def _gather_sequence(self, heads: Tensor) -> Tensor:
        # Each rank has a chunk from the start and one from the end. Unlike index_select, cat needs no atomic sums in its backward pass.
        chunks = gather_parts(heads, self._group, _SEQUENCE_DIM).chunk(2 * self.size, _SEQUENCE_DIM)
        return torch.cat((*chunks[::2], *reversed(chunks[1::2])), _SEQUENCE_DIM)


def apply_context_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Make `model` process only this rank's part of each sequence; the ranks of `mesh` share every sequence.

    All ranks still receive full sequences as input.
    """
    model.sequence_shard = group = ContextParallelGroup(mesh)
    model.model_coordinate = model.model_coordinate[0], model.model_coordinate[1] * mesh.size() + mesh.get_local_rank()
    for module in model.modules():
        if isinstance(module, Attention):
            module.gather_key_value = group.gather_key_value
