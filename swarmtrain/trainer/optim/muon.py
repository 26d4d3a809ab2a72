"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): updates a matrix by the orthogonalized momentum of its gradients.

Updates are scaled as by Liu et al. 2025 (arXiv 2502.16982), so that learning rates and weight decays of AdamW are suitable for Muon too.
A matrix that is sharded over ranks is gathered and orthogonalized, and each rank keeps its shard of the result: the update is the same in
every topology. All replicas would compute the same update, so each matrix is assigned to one replica, which broadcasts the update to the
other replicas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from swarmtrain.config.schema.optimizer import OptimizerConfig
from swarmtrain.trainer.optim.update_rules import NamedParameters, allocate_state, get_gradient_or_raise
from swarmtrain.trainer.parallel.shard_layout import ShardLayout

_NEWTON_SCHULZ_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_NEWTON_SCHULZ_ITERATIONS = 5


class Muon:
    """Muon update rule for matrices (2-dimensional parameters)."""

    communicates = True

    def __init__(
        self,
        parameters: NamedParameters,
        config: OptimizerConfig,
        shard_layout: ShardLayout,
        replica_group: dist.ProcessGroup | None = None,
        *,
        full_precision: bool,
    ) -> None:
        """Create the update rule for `parameters`.

        `replica_group`: process group of the ranks that hold the same parameter shards; None if no other rank holds them.
        `full_precision`: orthogonalize in the precision of the parameters; else in bfloat16, which is much cheaper.
        """
        self._parameters, self._momentum, self._shard_layout, self._full_precision = (
            parameters,
            config.momentum,
            shard_layout,
            full_precision,
        )
        self.moments = {"muon_momentum": allocate_state(parameters, config)}
        self._replica_group = replica_group
        # DTensor parameters are gathered on every replica, so all replicas compute their updates.
        costs = {
            name: count_newton_schulz_flops(parameter.shape) for name, parameter in parameters.items() if not isinstance(parameter, DTensor)
        }
        self._owners = assign_matrices_to_replicas(costs, replica_group.size()) if replica_group and replica_group.size() > 1 else {}
        self._updates: dict[str, Tensor] = {}

    def prepare_step(self) -> None:
        self._updates = {name: self._orthogonalize_update(name, self._compute_nesterov_momentum(name)) for name in self._parameters}
        # Broadcast after all updates are computed: otherwise a rank could wait for a broadcast while another waits for its shard.
        self._broadcast_updates(self._updates)

    def step(self, number: int, learning_rate: float, weight_decay: float) -> None:
        if not self._updates:
            self.prepare_step()
        for name, parameter in self._parameters.items():
            self.moments["muon_momentum"][name].copy_(self._compute_momentum(name))
            parameter.mul_(1 - learning_rate * weight_decay).sub_(
                self._updates.pop(name).to(parameter.dtype), alpha=learning_rate * self._compute_update_scale(name)
            )

    def _broadcast_updates(self, updates: dict[str, Tensor]) -> None:
        """Broadcast each update from the replica that has computed it to the other replicas."""
        broadcasts = [
            dist.broadcast(updates[name].view(-1).view(torch.uint8), group=self._replica_group, group_src=owner, async_op=True)
            for name, owner in self._owners.items()
        ]
        for work in broadcasts:
            work.wait()

    def _compute_momentum(self, parameter_name: str) -> Tensor:
        """Return the momentum of `parameter_name`, including this step's gradient.

        It is computed twice, in `prepare_step` and again in `step`, so that `prepare_step` does not change the stored momentum.
        """
        grad = get_gradient_or_raise(self._parameters[parameter_name])
        return self.moments["muon_momentum"][parameter_name].to(grad.dtype).lerp(grad, 1 - self._momentum)

    def _compute_nesterov_momentum(self, parameter_name: str) -> Tensor:
        """Return the Nesterov momentum of `parameter_name`, in the precision in which it is orthogonalized."""
        direction = get_gradient_or_raise(self._parameters[parameter_name]).lerp(
            self._compute_momentum(parameter_name), self._momentum
        )  # Nesterov momentum
        return direction if self._full_precision else direction.bfloat16()

    def _orthogonalize_update(self, parameter_name: str, direction: Tensor) -> Tensor:
        """Orthogonalize `direction` as a full matrix, and return the result sharded like `direction`.

        If another replica computes the update, return an uninitialized tensor, into which that update is broadcast.
        """
        if self._replica_group and self._owners.get(parameter_name, self._replica_group.rank()) != self._replica_group.rank():
            return torch.empty_like(direction, memory_format=torch.contiguous_format)
        full_direction = self._shard_layout.wrap_as_dtensor(parameter_name, direction)
        if not isinstance(full_direction, DTensor):
            return orthogonalize_matrix(full_direction).contiguous()
        mesh = full_direction.device_mesh
        replicated = DTensor.from_local(
            orthogonalize_matrix(full_direction.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False
        )
        sharded = replicated.redistribute(placements=full_direction.placements)
        return sharded if isinstance(direction, DTensor) else sharded.to_local().contiguous()

    def _compute_update_scale(self, parameter_name: str) -> float:
        """Return the factor that scales an orthogonalized matrix to the root mean square (RMS) of AdamW's updates."""
        full_parameter = self._shard_layout.wrap_as_dtensor(parameter_name, self._parameters[parameter_name].detach())
        return float(0.2 * max(full_parameter.shape) ** 0.5)


def orthogonalize_matrix(matrix: Tensor) -> Tensor:
    """Return approximately U V' of the singular value decomposition U S V' of `matrix`, by Newton-Schulz iterations.

    The singular values of the result are between 0.7 and 1.2.
    """
    a, b, c = _NEWTON_SCHULZ_COEFFICIENTS
    iterate = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    iterate = iterate / iterate.norm().clamp(min=1e-7)
    for _ in range(_NEWTON_SCHULZ_ITERATIONS):
        gram = iterate @ iterate.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        iterate = torch.addmm(iterate, gram, iterate, beta=a)
    return iterate.T if matrix.size(0) > matrix.size(1) else iterate


def count_newton_schulz_flops(shape: Sequence[int]) -> int:
    """Return the FLOPs of one Newton-Schulz iteration on a matrix of `shape`."""
    short, long = sorted(shape)
    return 4 * short * short * long + 2 * short**3


def assign_matrices_to_replicas(costs: Mapping[str, int], replica_count: int) -> dict[str, int]:
    """Return for each matrix the index of the replica that computes its update, so that costs are balanced.

    `costs`: FLOPs per matrix, by name. Greedy: the most expensive matrix first, to the least loaded of `replica_count` replicas.
    """
    loads, owners = [0] * replica_count, {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners
