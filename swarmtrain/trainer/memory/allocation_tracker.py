"""Allocation history: a record of every allocation and release of a tensor's storage, with its kind.

Entries are only appended while a step runs. The kind of an allocation is often known only later (a tensor becomes a
gradient once a parameter holds it), so the peak and its breakdown are computed from the whole history at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from swarmtrain.trainer.memory.simulated_rank import SimulatedRankObserver


class AllocationKind(StrEnum):
    """Kind of an allocation: what the memory is used for."""

    parameters = "parameters"
    gradients = "gradients"
    optimizer_state = "optimizer state"
    error_feedback = "error feedback"
    fp64_sums = "fp64 gradients"
    activations = "activations"
    logits = "logits"
    backward_gradients = "backward gradients"
    gathered_parameters = "gathered parameters"
    pipeline_buffers = "pipeline buffers"
    optimizer_step = "optimizer step"
    startup = "start"


@dataclass(frozen=True)
class MemoryPeak:
    """Peak of memory usage in bytes, and its breakdown by kind of allocation."""

    size: int
    breakdown: Mapping[AllocationKind, int]


class AllocationTracker(SimulatedRankObserver):
    """Dispatch mode that records the allocations of all operations."""

    def __init__(self, *, vocabulary_size: int, has_fp64_sums: bool) -> None:
        """`vocabulary_size`: size of the vocabulary shard in this rank's logits.

        `has_fp64_sums`: whether gradients are accumulated in fp64; float64 tensors are then recorded as such.
        """
        super().__init__()
        self._vocabulary_size, self._has_fp64_sums = vocabulary_size, has_fp64_sums
        self._phase: AllocationKind | None = AllocationKind.startup
        self._kinds: list[AllocationKind] = []
        self._changes: list[tuple[int, int]] = []
        self._storage_ids: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._storage_refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def observe_operation(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                self._register_storage(tensor)
        if operator is torch.ops.c10d.recv_.default:
            self.assign_allocation_kind(args[0], AllocationKind.pipeline_buffers)

    @contextmanager
    def track_allocations(self) -> Iterator[None]:
        """Context manager that records operations, and resizes of storages."""
        original_resize = torch.UntypedStorage.resize_

        @wraps(original_resize)
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            result = original_resize(storage, size)
            if (storage_id := self._storage_ids.get(storage._cdata)) is not None:
                if self._kinds[storage_id] is not AllocationKind.parameters:  # of DDP, which also frees weights; others are of fully_shard
                    self._kinds[storage_id] = AllocationKind.gathered_parameters
                self._record_storage_size(storage_id, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]  # not an operation, so it is not dispatched
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = original_resize  # type: ignore[method-assign]

    @contextmanager
    def attribute_allocations_to_phase(self, phase: AllocationKind | None) -> Iterator[None]:
        """Context manager that records allocations with the kind `phase`; None: activations, or gradients in a backward pass."""
        previous_phase, self._phase = self._phase, phase
        yield
        self._phase = previous_phase

    def assign_allocation_kind(self, tensors: Iterable[Tensor | None], kind: AllocationKind) -> None:
        """Set the allocation kind of the storages of `tensors` to `kind`."""
        for tensor in tensors:
            if tensor is not None:
                self._kinds[self._register_storage(_unwrap_dtensor(tensor))] = kind

    def track_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set the allocation kind of each gradient of `parameters` to `gradients` as soon as a backward pass has computed it."""
        for parameter in (candidate for candidate in parameters if candidate.requires_grad):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda made: self.assign_allocation_kind([made.grad], AllocationKind.gradients)
            )

    def get_allocation_history_position(self) -> int:
        """Return the current position in the allocation history, to be passed to `find_memory_peak`."""
        return len(self._changes)

    def find_memory_peak(self, start_position: int = 0, end_position: int | None = None) -> MemoryPeak:
        """Return the memory peak between two positions of the allocation history. `end_position`: None: to the end."""
        current, highest, peak_position = 0, -1, 0
        for position, (_, change) in enumerate(self._changes[:end_position], 1):
            current += change
            if current > highest and position >= start_position:
                highest, peak_position = current, position
        breakdown: Counter[AllocationKind] = Counter()
        for storage_id, change in self._changes[:peak_position]:
            breakdown[self._kinds[storage_id]] += change
        return MemoryPeak(highest, {kind: breakdown[kind] for kind in AllocationKind if breakdown[kind]})

    def _register_storage(self, tensor: Tensor) -> int:
        """Return the id of the storage of `tensor`, and record the storage if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storage_ids:
            storage_id = self._storage_ids[key] = len(self._kinds)
            self._kinds.append(self._infer_allocation_kind(tensor))
            self._record_storage_size(storage_id, storage.nbytes())
            self._storage_refs[key] = weakref.ref(storage, lambda _: self._release_storage(key))
        return self._storage_ids[key]

    def _release_storage(self, storage_key: int) -> None:
        del self._storage_refs[storage_key]
        self._record_storage_size(self._storage_ids.pop(storage_key), 0)

    def _record_storage_size(self, storage_id: int, size: int) -> None:
        previous_size = self._sizes.get(storage_id, 0)
        self._sizes[storage_id] = size
        self._changes.append((storage_id, size - previous_size))

    def _infer_allocation_kind(self, tensor: Tensor) -> AllocationKind:
        if self._phase is AllocationKind.startup:
            return AllocationKind.startup
        if self._has_fp64_sums and tensor.dtype is torch.float64 and tensor.dim():
            return AllocationKind.fp64_sums
        if tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary_size and tensor.is_floating_point():
            return AllocationKind.logits
        if self._phase is not None:
            return self._phase
        # A layer that is recomputed in the backward pass allocates activations there, with gradients enabled.
        in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        return AllocationKind.backward_gradients if in_backward else AllocationKind.activations


def _unwrap_dtensor(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
