"""How ranks come to the same mind: small collectives over the CPU, and values that rank 0 decides for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swarmtrain.errors import SwarmtrainError

T = TypeVar("T")


def barrier() -> None:
    """Return when every rank has come here."""
    dist.all_reduce(torch.zeros(1))


def totals(values: Sequence[float], group: dist.ProcessGroup | None = None) -> list[float]:
    """Return the sums of `values` over the ranks of `group` (default: all), in float64."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=group)
    return [float(value) for value in tensor]


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return the `value` of every rank of `group` (default: all), in the group's order, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def to_first_rank(value: T) -> list[T]:
    """Return the `value` of every rank, by rank, on rank 0, and nothing on the others."""
    values: list[Any] = [None] * dist.get_world_size() if dist.get_rank() == 0 else []
    dist.gather_object(value, values or None)
    return values


def by_first_rank(decide: Callable[[], T]) -> T:
    """Run `decide` on rank 0 and return its value on every rank. A SwarmtrainError raised there is raised on every rank."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except SwarmtrainError as error:
            answer[1] = error.message, error.place, error.hint, type(error)
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise _befell(0, *answer[1])
    value: T = answer[0]
    return value


def by_every_rank(act: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `act` on every rank of `group` (default: all) and return all values, in the group's order.

    A SwarmtrainError on any of them is raised on each of them.
    """
    mine: tuple[T | None, Any] = (None, None)
    try:
        mine = act(), None
    except SwarmtrainError as error:
        befell = dist.get_rank() if error.rank is None else error.rank  # it may have come from another rank already
        mine = None, (befell, error.message, error.place, error.hint, type(error))
    answers = gather(mine, group)
    for _, failure in answers:
        if failure is not None:
            raise _befell(*failure)
    return [value for value, _ in answers]  # type: ignore[misc]  # a value of None is T's own None here


def _befell(rank: int, message: str, place: str | None, hint: str | None, kind: type[SwarmtrainError]) -> SwarmtrainError:
    error = kind(message, place=place, hint=hint)
    error.rank = rank
    return error
