"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): the mean of a matrix's gradients, made orthogonal.

Scaled as by Liu et al. 2025 (arXiv 2502.16982), so that learning rates and weight decays of AdamW serve for it too.
A matrix that is divided over ranks is gathered whole, made orthogonal, and each takes its part: what is done is the same
in every topology. Replicas deal the matrices out between them, since each of them would compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from swarmtrain.config.optimizer import OptimizerConfig
from swarmtrain.trainer.optim.methods import Parameters, gradient, zeros
from swarmtrain.trainer.parallel.shards import Shards

_NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class Muon:
    """Makes the steps of matrices."""

    def __init__(
        self, parameters: Parameters, config: OptimizerConfig, shards: Shards, replicas: dist.ProcessGroup | None = None, *, exact: bool
    ) -> None:
        """`replicas`: ranks with the same parameters, None if there is no other.

        `exact`: make orthogonal in the parameters' own precision; else in bfloat16, at a fraction of the cost.
        """
        self._parameters, self._momentum, self._shards, self._exact = parameters, config.momentum, shards, exact
        self.moments = {"muon_momentum": zeros(parameters, config)}
        self._replicas = replicas
        # Parameters that are divided between replicas are gathered from all of them, so all can compute with them.
        dealt = {name: cost(parameter.shape) for name, parameter in parameters.items() if not isinstance(parameter, DTensor)}
        self._owners = deal(dealt, replicas.size()) if replicas and replicas.size() > 1 else {}
        self._changes: dict[str, Tensor] = {}

    def prepare(self) -> None:
        self._changes = {name: self._change(name, self._ahead(name)) for name in self._parameters}
        # Shared when all are made, so that no rank waits for another's broadcast while a third waits for its part of a matrix.
        self._share(self._changes)

    def step(self, number: int, rate: float, decay: float) -> None:
        if not self._changes:
            self.prepare()
        for name, parameter in self._parameters.items():
            self.moments["muon_momentum"][name].copy_(self._mean(name))
            parameter.mul_(1 - rate * decay).sub_(self._changes.pop(name).to(parameter.dtype), alpha=rate * self._scale(name))

    def _share(self, changes: dict[str, Tensor]) -> None:
        """Fill in what other replicas have made."""
        sent = [
            dist.broadcast(changes[name].view(torch.uint8), group=self._replicas, group_src=owner, async_op=True)
            for name, owner in self._owners.items()
        ]
        for work in sent:
            work.wait()

    def _mean(self, name: str) -> Tensor:
        """Return the mean of a matrix's gradients, this step's included; it is taken twice, before and after what may fail."""
        slope = gradient(self._parameters[name])
        return self.moments["muon_momentum"][name].to(slope.dtype).lerp(slope, 1 - self._momentum)

    def _ahead(self, name: str) -> Tensor:
        """Return where the mean of a matrix's gradients points, in the precision in which that is made orthogonal."""
        ahead = gradient(self._parameters[name]).lerp(self._mean(name), self._momentum)  # Nesterov's
        return ahead if self._exact else ahead.bfloat16()

    def _change(self, name: str, ahead: Tensor) -> Tensor:
        """Return the whole of `ahead` made orthogonal, laid out as `ahead` is; room for it, if that is another replica's to do."""
        if self._replicas and self._owners.get(name, self._replicas.rank()) != self._replicas.rank():
            return torch.empty_like(ahead)
        whole = self._shards.whole(name, ahead)
        if not isinstance(whole, DTensor):
            return orthogonal(whole).contiguous()
        mesh = whole.device_mesh
        copies = DTensor.from_local(orthogonal(whole.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
        divided = copies.redistribute(placements=whole.placements)
        return divided if isinstance(ahead, DTensor) else divided.to_local().contiguous()

    def _scale(self, name: str) -> float:
        """Return the factor that makes an orthogonal matrix as long as AdamW's steps are."""
        whole = self._shards.whole(name, self._parameters[name].detach())
        return float(0.2 * max(whole.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return nearly U V' of the singular value decomposition U S V' of `matrix`: singular values become 0.7 to 1.2."""
    a, b, c = _NEWTON_SCHULZ
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, gram, wide, beta=a)
    return wide.T if matrix.size(0) > matrix.size(1) else wide


def cost(shape: Sequence[int]) -> int:
    """Return the operations of one iteration on a matrix of `shape`."""
    short, long = sorted(shape)
    return 4 * short * short * long + 2 * short**3


def deal(costs: Mapping[str, int], hands: int) -> dict[str, int]:
    """Return which of `hands` takes what, so that each has about the same to do: the costliest first, to who has least."""
    loads, owners = [0] * hands, {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners
