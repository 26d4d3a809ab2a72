"""Collective operations for small Python values, and functions that run on rank 0 or on all ranks and share their results and errors.

Values are sent as JSON in tensors. torch's object collectives send pickles, which can execute code when they are loaded, and anyone who
reaches the port of a rank can take part in a collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain import errors
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


def all_gather_values(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather `value` from every rank of `group` (default: all ranks). Return the list on every rank, in the order of the group's ranks.

    `value` must be of a type that `encode_value` supports.
    """
    content = _encode_as_tensor(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([content.numel()]), group=group)
    max_size = max(int(size) for size in sizes)
    contents = [torch.empty(max_size, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(contents, torch.nn.functional.pad(content, (0, max_size - content.numel())), group=group)
    return [_decode_from_tensor(content[: int(size)]) for content, size in zip(contents, sizes, strict=True)]


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and return its result on every rank. The result must be of a type that `encode_value` supports.

    A SwarmtrainError that `function` raises on rank 0 is raised on every rank.
    """
    content, size = torch.empty(0, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    if dist.get_rank() == 0:
        content = _encode_as_tensor(_run_and_catch_errors(function))
        size[0] = content.numel()
    dist.broadcast(size, src=0)
    if dist.get_rank() != 0:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, src=0)
    value, failure = _decode_from_tensor(content)
    if failure is not None:
        raise _build_rank_error(failure)
    result: T = value
    return result


def run_on_all_ranks(function: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `function` on every rank of `group` (default: all ranks) and return all results, in the order of the group's ranks.

    The results must be of types that `encode_value` supports. If `function` raises SwarmtrainError on any rank, that error is raised on
    every rank of the group.
    """
    outcomes = all_gather_values(_run_and_catch_errors(function), group)
    for _, failure in outcomes:
        if failure is not None:
            raise _build_rank_error(failure)
    return [value for value, _ in outcomes]


def encode_value(value: Any) -> Any:
    """Return `value` as JSON: None, a bool, an int, a float, a str, a path, or a list, a tuple, a set or a dict of such values.

    `decode_value` returns an equal value of the same type. Raises TypeError if `value` has another type, for example a subclass.
    """
    if type(value) in _JSON_TYPES:
        return value
    if type(value) is list:
        return [encode_value(each) for each in value]
    if type(value) is dict:
        return {"dict": [[encode_value(key), encode_value(each)] for key, each in value.items()]}
    if type(value) is tuple:
        return {"tuple": [encode_value(each) for each in value]}
    if type(value) is set:
        return {"set": [encode_value(each) for each in value]}
    if isinstance(value, Path):
        return {"path": str(value)}
    raise TypeError(f"a value of the type {type(value).__name__} cannot be sent to other ranks")


def decode_value(encoded: Any) -> Any:
    """Return the value that `encode_value` has encoded. Raises ValueError, TypeError or KeyError if it has encoded none."""
    if isinstance(encoded, list):
        return [decode_value(each) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    [(kind, content)] = encoded.items()
    return _DECODERS[kind](content)


_JSON_TYPES = (NoneType, bool, int, float, str)
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda pairs: {decode_value(key): decode_value(each) for key, each in pairs},
    "tuple": lambda values: tuple(decode_value(each) for each in values),
    "set": lambda values: {decode_value(each) for each in values},
    "path": Path,
}


_ERROR_CLASSES = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type)
    and issubclass(value, SwarmtrainError)
    and vars(value).get("__init__") in (None, vars(SwarmtrainError)["__init__"])
}
"""Error classes that ranks exchange, by name: those in errors.py that are built from a message, a place and a hint."""


def _encode_as_tensor(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(encode_value(value)).encode()), dtype=torch.uint8)


def _decode_from_tensor(content: Tensor) -> Any:
    return decode_value(json.loads(content.numpy().tobytes()))


def _run_and_catch_errors(function: Callable[[], Any]) -> tuple[Any, dict[str, Any] | None]:
    """Return the result of `function` and None, or None and the encoded SwarmtrainError that it raises."""
    try:
        return function(), None
    except SwarmtrainError as error:
        return None, {
            "class": _find_error_class_name(type(error)),
            "rank": dist.get_rank() if error.rank is None else error.rank,  # if set, another rank raised it in a nested call
            "message": error.message,
            "place": error.place,
            "hint": error.hint,
            "is_permanent": error.is_permanent,
        }


def _find_error_class_name(error_class: type[SwarmtrainError]) -> str:
    """Return the name of `error_class`, or of its first base class in errors.py that is built from a message, a place and a hint."""
    return next(base.__name__ for base in error_class.__mro__ if base in _ERROR_CLASSES.values())


def _build_rank_error(failure: dict[str, Any]) -> SwarmtrainError:
    """Return the error that `_run_and_catch_errors` has encoded as `failure`."""
    error = _ERROR_CLASSES[failure["class"]](failure["message"], place=failure["place"], hint=failure["hint"])
    error.rank, error.is_permanent = failure["rank"], failure["is_permanent"]
    return error
