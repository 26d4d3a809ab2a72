"""PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithms 1 and 2): replicas send low-rank factors of their gradients.

Of a gradient M of n x m values, a replica sends a factor P of n x r and a factor Q of m x r values, which replicas sum. What the
approximation P Q' misses is added to the next step's gradient of the same replica (error feedback). The next step begins with the last Q
(warm start). Vectors and small matrices are summed exactly.

The error of a replica is what its own factors miss of its own gradient. torch's powerSGD_hook subtracts the mean of all replicas, so the
error of a replica with more micro batches than the others grows with each step. The hook also starts collectives from callbacks, in an
order that can differ between ranks. See docs/explanation/decisions/0047-gradient-compression.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.config.schema.fields.gradient_compression import PowerSgdConfig
from swarmtrain.trainer.random_seeds import derive_seed

_MIN_COMPRESSION = 2
"""A matrix is compressed if it has more than this many times the values of its factors. As in torch's hook."""


class PowerSgdCompression:
    """Sums gradients over the ranks of a group by low-rank factors. Its state are the errors and the factors Q of all matrices."""

    def __init__(self, weights: Mapping[str, Tensor], group: dist.ProcessGroup, config: PowerSgdConfig, *, seed: int) -> None:
        """Create the initial state for `weights`, by name. `seed`: seed of the initial factors."""
        self.is_active = False
        self._group, self._start_step, self._seed = group, config.start_step, seed
        self._gradients: dict[Tensor, Tensor] = {}
        self._errors: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}
        self._names = {weight: name for name, weight in weights.items() if weight.requires_grad}
        for weight, name in self._names.items():
            rows, columns = _get_matrix_size(weight)
            if rank := _choose_rank(rows, columns, config):
                dtype = torch.promote_types(weight.dtype, torch.float32)
                self._errors[name] = torch.empty((rows, columns), dtype=dtype, device=weight.device)
                self._factors[name] = torch.empty((columns, rank), dtype=dtype, device=weight.device)
        self.reset_state()

    def start_step(self, number: int) -> None:
        """Compress gradients if `number` is above start_step."""
        self.is_active = number > self._start_step

    def start_sum(self, gradients: Mapping[Tensor, Tensor]) -> None:
        """Keep `gradients` until all are known: so few bytes are sent that they need not be sent during the backward pass."""
        self._gradients |= gradients

    @torch.no_grad()
    def finish_sums(self) -> None:
        """Sum all gradients over replicas: matrices by their factors, all others exactly."""
        by_name = {name: self._gradients[weight] for weight, name in self._names.items() if weight in self._gradients}
        self._gradients = {}
        small = [gradient for name, gradient in by_name.items() if name not in self._errors]
        compressed = {name: gradient.view_as(self._errors[name]) for name, gradient in by_name.items() if name in self._errors}
        small_sums = torch.cat([gradient.flatten() for gradient in small]) if small else None
        work = dist.all_reduce(small_sums, group=self._group, async_op=True) if small_sums is not None else None
        if compressed:
            self._sum_by_factors(compressed)
        if small_sums is not None and work is not None:
            work.wait()
            for gradient, total in zip(small, torch.split(small_sums, [each.numel() for each in small]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _sum_by_factors(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the matrices `gradients`, by name, with approximations of their sums over replicas."""
        left = {}
        for name, gradient in gradients.items():
            self._errors[name] += gradient  # the matrix to approximate
            left[name] = self._errors[name] @ torch.linalg.qr(self._factors[name])[0]
        left = {name: torch.linalg.qr(factor)[0] for name, factor in self._sum_over_replicas(left).items()}
        right = {name: self._errors[name].T @ factor for name, factor in left.items()}
        for name, factor in left.items():
            self._errors[name].addmm_(factor, right[name].T, alpha=-1)
        for name, factor in self._sum_over_replicas(right).items():
            self._factors[name].copy_(factor)
            gradients[name].copy_(left[name] @ factor.T)

    def _sum_over_replicas(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
        dist.all_reduce(flat, group=self._group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors.values()])
        return {name: part.view_as(tensor) for (name, tensor), part in zip(tensors.items(), parts, strict=True)}

    def collect_state_tensors(self) -> dict[str, Tensor]:
        """Return the errors and the factors Q, named error/PARAMETER and factor/PARAMETER. The factors P are computed in each step."""
        named = ("error", self._errors), ("factor", self._factors)
        return {f"{kind}/{name}": tensor for kind, tensors in named for name, tensor in tensors.items()}

    def reset_state(self) -> None:
        """Set all errors to 0, and the factors to random values, the same on all ranks."""
        for name, error in self._errors.items():
            error.zero_()
            generator, factor = torch.Generator().manual_seed(derive_seed(self._seed, name)), self._factors[name]
            factor.copy_(torch.randn(factor.shape, generator=generator, dtype=factor.dtype))


def count_sent_values(weight: Tensor, config: PowerSgdConfig) -> int:
    """Return the number of values that a replica sends of a gradient of `weight`."""
    rows, columns = _get_matrix_size(weight)
    rank = _choose_rank(rows, columns, config)
    return (rows + columns) * rank if rank else weight.numel()


def _get_matrix_size(weight: Tensor) -> tuple[int, int]:
    return len(weight), weight.numel() // max(1, len(weight))


def _choose_rank(rows: int, columns: int, config: PowerSgdConfig) -> int:
    """Return the rank of the approximation of a matrix; 0 if it is summed exactly, because the factors are not much smaller."""
    rank = min(rows, columns, config.matrix_approximation_rank)
    return rank if (rows + columns) * rank * _MIN_COMPRESSION < rows * columns else 0
