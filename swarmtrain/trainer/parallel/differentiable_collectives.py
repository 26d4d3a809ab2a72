"""Collectives inside a forward pass, with the collective that their backward pass needs.

Compiled code runs torch's functional collectives, which the compiler understands; other code runs ordinary ones, which need less host
time. DTensor is not used: its decisions cost the host several times as much as a small layer. All are synchronous.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from swarmtrain.trainer import collectives

_c10d = torch.ops._c10d_functional
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class RankGroup(NamedTuple):
    """A process group by its name, which compiled code can contain."""

    name: GroupName
    size: int

    @classmethod
    def from_process_group(cls, group: dist.ProcessGroup) -> Self:
        """Return the group of the ranks of `group`."""
        return cls(group.group_name, group.size())

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group with this name."""
        return dist.distributed_c10d._resolve_process_group(self.name)


def sum_over_ranks(values: Tensor, group: RankGroup) -> Tensor:
    """Return the sum of `values` over the ranks of `group`. Each rank receives the gradient of its summand."""
    if not torch.compiler.is_compiling():
        # The gradient of a summand is that of the sum, so autograd need not see the all-reduce. It runs on a copy, since selective
        # activation checkpointing keeps `values` for the backward pass.
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total.detach(), group=group.process_group)
        return total
    result: Tensor = _SumOverRanks.apply(values, group)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def sum_gradients(values: Tensor, group: RankGroup) -> Tensor:
    """Return `values`, which are the same on all ranks of `group`. Their gradient is summed over the ranks."""
    if not torch.compiler.is_compiling():
        if not values.requires_grad:
            return values
        alias = values.view_as(values)  # other operations may use `values`, too
        alias.register_hook(lambda gradient: reduce_tensor(gradient, "sum", group))  # type: ignore[no-untyped-call]  # not typed in torch
        return alias
    result: Tensor = _SumGradients.apply(values, group)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def gather_parts(part: Tensor, group: RankGroup, dim: int, *, replicated_rank: int | None = None) -> Tensor:
    """Return the parts of all ranks of `group`, concatenated along `dim`.

    The gradients of all ranks are summed, and each rank receives that of its part. `replicated_rank`: set if all ranks compute the same
    from the result: this rank's index in the group. All ranks have the same gradient then, and this rank takes that of its part.
    """
    result: Tensor = _GatherParts.apply(part, group, dim, replicated_rank)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def sum_and_divide(values: Tensor, group: RankGroup, dim: int) -> Tensor:
    """Return this rank's part along `dim` of the sum of `values` over the ranks of `group`. Gradients are gathered."""
    result: Tensor = _SumAndDivide.apply(values, group, dim)  # type: ignore[no-untyped-call]  # not typed in torch
    return result


def reduce_tensor(values: Tensor, operation: str, group: RankGroup) -> Tensor:
    """Return `values` reduced by `operation`, "sum" or "max", over the ranks of `group`. Not differentiable."""
    if torch.compiler.is_compiling():
        result: Tensor = _c10d.wait_tensor(_c10d.all_reduce(values.contiguous(), operation, group.name))
        return result
    result = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, _OPERATIONS[operation], group.process_group)
    return result


def _gather(part: Tensor, group: RankGroup, dim: int) -> Tensor:
    shape, values = part.shape, part.reshape(-1)
    if torch.compiler.is_compiling():
        gathered: Tensor = _c10d.wait_tensor(_c10d.all_gather_into_tensor(values, group.size, group.name))
    else:
        gathered = values.new_empty(group.size * len(values))
        collectives.all_gather_single(gathered, values, group.process_group)
    parts = gathered.view(group.size, *shape).movedim(0, dim)
    return parts.reshape(*shape[:dim], group.size * shape[dim], *shape[dim + 1 :])  # a copy only if a dimension before `dim` is not 1


def _reduce_scatter(values: Tensor, group: RankGroup, dim: int) -> Tensor:
    shape, size = values.shape, values.shape[dim] // group.size
    parts = values.reshape(*shape[:dim], group.size, size, *shape[dim + 1 :]).movedim(dim, 0).reshape(-1)
    if torch.compiler.is_compiling():
        result: Tensor = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(parts, "sum", group.size, group.name))
    else:
        result = parts.new_empty(len(parts) // group.size)
        collectives.reduce_scatter_single(result, parts, group=group.process_group)
    return result.view(*shape[:dim], size, *shape[dim + 1 :])


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
    def forward(ctx: Any, part: Tensor, group: RankGroup, dim: int, replicated_rank: int | None) -> Tensor:
        ctx.group, ctx.dim, ctx.replicated_rank = group, dim, replicated_rank
        return _gather(part, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.replicated_rank is None:
            return _reduce_scatter(gradient, ctx.group, ctx.dim), None, None, None
        return gradient.chunk(ctx.group.size, ctx.dim)[ctx.replicated_rank], None, None, None


class _SumAndDivide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: RankGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _reduce_scatter(values, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.group, ctx.dim), None, None
