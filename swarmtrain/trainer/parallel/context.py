"""Context parallelism: each rank has a part of every sequence, and gathers the keys and values of the whole for attention.

All but attention looks at one token at a time, so it needs nothing of the others. A token sees those before it, so the
later ones cost most; each rank has one part from the front and the one as far from the end, and all have as much to do.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from swarmtrain.trainer.model.attention import Attention
from swarmtrain.trainer.model.transformer import Transformer

_SEQUENCE = 2
"""The dimension of heads (batch, head, sequence, dimension)."""


class Sharing:
    """The ranks of a mesh of one dimension, which share sequences."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.size = mesh.size()
        self._mesh, self._rank = mesh, mesh.get_local_rank()

    def places(self, length: int, device: torch.device) -> Tensor:
        """Return the places, in sequences of `length`, of the tokens that this rank has. Twice the ranks must divide it."""
        return self._all_places(length, device)[self._rank]

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return both of the whole sequence. Their gradients are summed over ranks, and each gets back its part."""
        return self._whole(key), self._whole(value)

    def _whole(self, heads: Tensor) -> Tensor:
        divided = DTensor.from_local(heads, self._mesh, [Shard(_SEQUENCE)], run_check=False)
        whole = divided.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        order = self._all_places(whole.shape[_SEQUENCE], heads.device).flatten().argsort()
        return whole.index_select(_SEQUENCE, order)

    def _all_places(self, length: int, device: torch.device) -> Tensor:
        """Return the places of each rank's tokens, a row for each rank."""
        parts = torch.arange(length, device=device).view(2 * self.size, -1)
        return torch.cat((parts[: self.size], parts[self.size :].flip(0)), dim=1)


def share(model: Transformer, mesh: DeviceMesh) -> None:
    """Let the ranks of `mesh` share each sequence that `model` is given; all of them are given the whole."""
    model.context = sharing = Sharing(mesh)
    model.place = model.place[0], model.place[1] * mesh.size() + mesh.get_local_rank()
    for module in model.modules():
        if isinstance(module, Attention):
            module.gather = sharing.gather
