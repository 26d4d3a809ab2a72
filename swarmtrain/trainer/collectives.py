"""How ranks agree: small collectives over the CPU, and values that rank 0 decides for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swarmtrain.errors import SwarmtrainError

T = TypeVar("T")


def barrier() -> None:
    """Return when every rank has reached this call."""
    dist.all_reduce(torch.zeros(1))


def all_reduce_sum(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the sums of `values` over the ranks of `group` (default: all), in float64."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return [float(value) for value in tensor]


def all_gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank of `group` (default: all), in the group's order, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_to_rank_zero(value: T) -> list[T]:
    """Return the `value` of every rank, by rank, on rank 0, and an empty list on the others."""
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None)
    return values


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and return its value on every rank. A SwarmtrainError raised there is raised on every rank."""
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
    """Run `function` on every rank of `group` (default: all) and return all values, in the group's order.

    A SwarmtrainError on any of them is raised on each of them.
    """
    local_outcome: tuple[T | None, Any] = (None, None)
    try:
        local_outcome = function(), None
    except SwarmtrainError as error:
        failed_rank = dist.get_rank() if error.rank is None else error.rank  # it may have been raised on another rank
        local_outcome = None, (failed_rank, error.message, error.place, error.hint, type(error))
    outcomes = all_gather_objects(local_outcome, group)
    for _, failure in outcomes:
        if failure is not None:
            raise _build_rank_error(*failure)
    return [value for value, _ in outcomes]  # type: ignore[misc]  # a value of None belongs to T here


def _build_rank_error(rank: int, message: str, place: str | None, hint: str | None, error_class: type[SwarmtrainError]) -> SwarmtrainError:
    error = error_class(message, place=place, hint=hint)
    error.rank = rank
    return error
