"""Counts of operations: kernels, casts, host synchronizations, and bytes that are read, written and sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from swarmtrain.trainer.memory.simulated_rank import SimulatedRankObserver

_CASTS = {"aten::_to_copy", "aten::copy_", "aten::_foreach_copy_"}
_MATRIX_OPERATIONS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
_ATTENTION = "attention", "attn"
"""Parts of the names of all operations that compute attention."""
_ALLOCATIONS = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
"""Operations that allocate memory without writing to it."""
_LOOKUPS = {"aten::embedding", "aten::gather", "aten::index", "aten::index_select"}
"""Operations that read only some rows of their first argument: as many bytes as they write."""
_OVERWRITES = {"aten::copy_", "aten::_foreach_copy_", "aten::fill_", "aten::zero_"}
"""Operations that overwrite their first argument without reading it."""
_HOST_READS = {"aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
"""Operations whose result has a value or a shape that the host needs, besides reads of scalars."""
_RING_ROUNDS = {"allgather": 1, "all_gather": 1, "reduce_scatter": 1, "alltoall": 1, "allreduce": 2, "all_reduce": 2}
"""Number of times that a collective passes the unsharded tensor around a ring of ranks, or sends it in parts to all other ranks."""


@dataclass(frozen=True)
class OperationCosts:
    """Costs of a sequence of operations. Counts of a part are differences of two totals, so they can be fractions."""

    kernels: float = 0
    """Operations that read or write device memory. Each is at least one kernel on a GPU."""
    casts: float = 0
    """Kernels that only convert numbers from one floating-point type to another."""
    synchronizations: float = 0
    """Number of times the host waits for the device. Reads without a kernel between them count as one."""
    bytes_moved: float = 0
    """Bytes that kernels read and write, without those of matrix products and attention, whose time is not determined by them."""
    bytes_sent: float = 0
    """Bytes that this rank sends to other ranks in collectives, with ring algorithms."""

    def __add__(self, other: Self) -> OperationCosts:
        return OperationCosts(*(mine + theirs for mine, theirs in self._pair_with(other)))

    def __sub__(self, other: Self) -> OperationCosts:
        return OperationCosts(*(mine - theirs for mine, theirs in self._pair_with(other)))

    def _pair_with(self, other: OperationCosts) -> Iterator[tuple[float, float]]:
        return zip(asdict(self).values(), asdict(other).values(), strict=True)


class OperationCounter(SimulatedRankObserver):
    """Dispatch mode, inside a FakeTensorMode, that adds up the costs of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.total = OperationCosts()
        """Costs of all operations so far."""
        self._reads_since_kernel = 0
        self._fake_mode: Any = None
        self._host_storages: dict[int, torch.UntypedStorage] = {}
        """Storages of tensors that are created from numbers of the host, kept so that their ids are not used again."""

    def __enter__(self) -> Self:
        self._fake_mode = active_fake_mode()  # type: ignore[no-untyped-call]  # not typed in torch
        entered: Self = super().__enter__()  # type: ignore[no-untyped-call]  # as above
        return entered

    def observe_operation(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        name, inputs, results = operator._schema.name, _list_tensors((args, kwargs)), _list_tensors(result)
        if any(isinstance(tensor, FakeTensor) and tensor.fake_mode is not self._fake_mode for tensor in (*inputs, *results)):
            return  # DTensor only infers the shape of a result
        if name.startswith(("c10d::", "_c10d_functional::")):
            self.total += OperationCosts(bytes_sent=_count_sent_bytes(name, args, (args, kwargs, result)))
            return
        if name == "aten::lift_fresh" or (inputs and all(map(self._is_on_host, inputs))):  # torch.tensor(numbers), and what follows from it
            self._host_storages |= {_get_storage_id(tensor): tensor.untyped_storage() for tensor in results}
            return
        if not (results or inputs) or name in _ALLOCATIONS or _is_view(operator, inputs, results):
            return
        if name in _HOST_READS:
            self.observe_scalar_read(inputs[0])
        self._reads_since_kernel = 0
        is_bound_by_memory = name not in _MATRIX_OPERATIONS and not any(text in name for text in _ATTENTION)
        self.total += OperationCosts(
            kernels=1,
            casts=name in _CASTS and len(_collect_float_types((args, kwargs, result))) > 1,
            bytes_moved=_count_moved_bytes(operator, args, kwargs, result) if is_bound_by_memory else 0,
        )

    def observe_scalar_read(self, tensor: Tensor) -> None:
        if self._is_on_host(tensor):
            return
        if not self._reads_since_kernel:
            self.total += OperationCosts(synchronizations=1)
        self._reads_since_kernel += 1

    def _is_on_host(self, tensor: Tensor) -> bool:
        return _get_storage_id(tensor) in self._host_storages


def _is_view(operator: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Return whether `operator` computes nothing: it writes to none of its inputs, and its results share their memory."""
    storages = {_get_storage_id(tensor) for tensor in inputs}
    return not operator._schema.is_mutable and all(_get_storage_id(each) in storages for each in results)


def _count_moved_bytes(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    name, written = operator._schema.name, sum(map(_count_bytes, _list_tensors(result)))
    if name in _LOOKUPS:
        return 2 * written
    inputs = _list_tensors((args, kwargs))
    if not operator._schema.is_mutable:
        return sum(map(_count_bytes, inputs)) + written
    changed = [
        tensor
        for argument, value in _pair_arguments(operator, args, kwargs)
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in _list_tensors(value)
    ]
    changed_ids = {id(tensor) for tensor in changed}
    read = [tensor for tensor in inputs if name not in _OVERWRITES or id(tensor) not in changed_ids]
    if "index_put" in name or "scatter" in name:  # only the given rows are changed
        return 2 * sum(_count_bytes(tensor) for tensor in read if id(tensor) not in changed_ids)
    return sum(map(_count_bytes, read)) + sum(map(_count_bytes, changed))


def _pair_arguments(operator: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(operator._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _count_sent_bytes(operator_name: str, arguments: Sequence[Any], tensors: Any) -> float:
    rounds = next((count for collective, count in _RING_ROUNDS.items() if collective in operator_name), 0)
    rank_count = next(filter(None, map(_find_rank_count, arguments)), 1)
    return rounds * (1 - 1 / rank_count) * max(map(_count_bytes, _list_tensors(tensors)), default=0)


def _find_rank_count(argument: Any) -> int | None:
    """Return the number of ranks if `argument` is a process group or its name."""
    group: dist.ProcessGroup | None = None
    if isinstance(argument, torch.ScriptObject):
        with suppress(RuntimeError):  # an object of another type
            group = dist.ProcessGroup.unbox(argument)
    elif isinstance(argument, str) and argument.isdigit():
        group = dist.distributed_c10d._resolve_process_group(GroupName(argument))
    return None if group is None else group.size()


def _get_storage_id(tensor: Tensor) -> int:
    storage_id: int = tensor.untyped_storage()._cdata
    return storage_id


def _count_bytes(tensor: Tensor) -> int:
    """Return the number of bytes of the different elements of `tensor`: an expanded dimension counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return math.prod(sizes) * tensor.element_size()


def _collect_float_types(tensors: Any) -> set[Any]:
    return {tensor.dtype for tensor in _list_tensors(tensors) if tensor.is_floating_point()}


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
