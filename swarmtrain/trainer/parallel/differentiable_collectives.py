"""Collectives inside a forward pass, with the collective that their backward pass needs.

They call torch's functional collectives directly: these can be compiled, and need no DTensor, whose decisions cost the host several times
as much as a small layer. All are synchronous, and work in place on nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

_c10d = torch.ops._c10d_functional


class RankGroup(NamedTuple):
    """A process group by its name, which compiled code can contain."""

    name: str
    size: int

    @classmethod
    def from_process_group(cls, group: dist.ProcessGroup) -> Self:
        """Return the group of the ranks of `group`."""
        return cls(group.group_name, group.size())


def sum_over_ranks(values: Tensor, group: RankGroup) -> Tensor:
    """Return the sum of `values` over the ranks of `group`. Each rank receives the gradient of its summand."""
    result: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def sum_gradients(values: Tensor, group: RankGroup) -> Tensor:
    """Return `values`, which are the same on all ranks of `group`. Their gradient is summed over the ranks."""
    result: Tensor = _SumGradients.apply(values, group)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def gather_parts(part: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Return the parts of all ranks of `group`, concatenated along `dim`. The gradient is summed over ranks; each receives its part's."""
    result: Tensor = _GatherParts.apply(part, group, dim)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def gather_for_equal_computation(part: Tensor, group: RankGroup, dim: int, rank: int) -> Tensor:
    """Return the parts of all ranks of `group`, concatenated along `dim`, from which all ranks compute the same.

    All ranks have the gradient of all parts, so this rank, whose index in the group is `rank`, takes that of its own part.
    """
    result: Tensor = _GatherForEqualComputation.apply(part, group, dim, rank)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def sum_and_divide(values: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Return this rank's part along `dim` of the sum of `values` over the ranks of `group`. Gradients are gathered."""
    result: Tensor = _SumAndDivide.apply(values, group, dim)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def reduce_tensor(values: Tensor, operation: str, group: RankGroup) -> Tensor:
    """Return `values` reduced by `operation`, "sum" or "max", over the ranks of `group`. Not differentiable."""
    result: Tensor = _c10d.wait_tensor(_c10d.all_reduce(values.contiguous(), operation, group.name))
    return result


def _gather(part: Tensor, group: RankGroup, dim: int) -> Tensor:
    gathered: Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(part.contiguous(), group.size, group.name))
    return gathered if dim == 0 else torch.cat(gathered.chunk(group.size), dim)


def _reduce_scatter(values: Tensor, group: RankGroup, dim: int) -> Tensor:
    parts = values.contiguous() if dim == 0 else torch.cat(values.chunk(group.size, dim))
    result: Tensor = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(parts, "sum", group.size, group.name))
    return result


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: RankGroup) -> Tensor:
        return reduce_tensor(values, "sum", group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: RankGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_tensor(gradient, "sum", ctx.group), None


class _GatherParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: RankGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(part, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(gradient, ctx.group, ctx.dim), None, None


class _GatherForEqualComputation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: RankGroup, dim: int, rank: int) -> Tensor:
        ctx.size, ctx.dim, ctx.rank = group.size, dim, rank
        return _gather(part, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.chunk(ctx.size, ctx.dim)[ctx.rank], None, None, None


class _SumAndDivide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: RankGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(values, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.group, ctx.dim), None, None
