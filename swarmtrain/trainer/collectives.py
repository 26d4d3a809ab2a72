"""Collective operations for small Python values, and functions that run on rank 0 or on all ranks and share their results and errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swarmtrain.errors import SwarmtrainError

T = TypeVar("T")

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch.distributed.all_gather_single, by the name that torch 2.13 has deprecated if this torch is older."""
reduce_scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
"""torch.distributed.reduce_scatter_single, by the name that torch 2.13 has deprecated if this torch is older."""

MESSAGE_BYTES = 1 << 20
"""Size up to which a message over a slow link should be divided, if all ranks send at the same time.

gloo sends a message once the other rank has announced that it is ready to receive it. The announcement uses the same connection, and waits
there behind the message that this other rank is sending. So large messages in opposite directions follow one another, and use half of the
link: 38 MB of each of two ranks take 6.3 s at 100 Mbit/s in one message, and 3.2 s in messages of this size.
"""


def barrier() -> None:
    """Block until every rank has called this function."""
    dist.all_reduce(torch.zeros(1))


def all_reduce_sum(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the sums of `values` over the ranks of `group` (default: all ranks), in float64."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return [float(value) for value in tensor]


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather `value` from every rank of `group` (default: all ranks). Return the list on every rank, in the order of the group's ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_objects_to_rank_zero(value: T) -> list[T]:
    """Gather `value` from every rank. Return the list in rank order on rank 0, and an empty list on all other ranks."""
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None)
    return values


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and return its result on every rank.

    A SwarmtrainError that `function` raises on rank 0 is raised on every rank.
    """
    value_and_error: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            value_and_error[0] = function()
        except SwarmtrainError as error:
            value_and_error[1] = error.message, error.place, error.hint, type(error)
    dist.broadcast_object_list(value_and_error, src=0)
    if value_and_error[1] is not None:
        raise _build_rank_error(0, *value_and_error[1])
    value: T = value_and_error[0]
    return value


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `function` on every rank of `group` (default: all ranks) and return all results, in the order of the group's ranks.

    If `function` raises SwarmtrainError on any rank, that error is raised on every rank of the group.
    """
    local_outcome: tuple[T | None, Any] = (None, None)
    try:
        local_outcome = function(), None
    except SwarmtrainError as error:
        failed_rank = dist.get_rank() if error.rank is None else error.rank  # if set, another rank raised it in a nested call
        local_outcome = None, (failed_rank, error.message, error.place, error.hint, type(error))
    outcomes = all_gather_objects(local_outcome, group)
    for _, failure in outcomes:
        if failure is not None:
            raise _build_rank_error(*failure)
    return [value for value, _ in outcomes]  # type: ignore[misc]  # None is a valid value of T


def _build_rank_error(rank: int, message: str, place: str | None, hint: str | None, error_class: type[SwarmtrainError]) -> SwarmtrainError:
    error = error_class(message, place=place, hint=hint)
    error.rank = rank
    return error
