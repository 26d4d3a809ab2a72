"""What is in memory, by what it is for: a book of every storage that operations make and let go.

Entries are only written while a step runs. What a storage was for is often known later than it is made (a gradient is one
once its parameter has it), so the peak and its parts are worked out at the end, by going through the book.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Kind(StrEnum):
    """What memory is for."""

    parameters = "parameters"
    gradients = "gradients"
    state = "optimizer state"
    sums = "sums in fp64"
    activations = "activations"
    logits = "logits"
    backward = "gradients on their way"
    gathered = "gathered parameters"
    buffers = "pipeline buffers"
    step = "in the optimizer's step"
    start = "start"


@dataclass(frozen=True)
class Peak:
    """The most memory at a time, in bytes, and what it was for."""

    size: int
    parts: Mapping[Kind, int]


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own is not typed
    """While entered, notes the memory of whatever is computed. No tensor need be real: of numbers asked for, each is one."""

    def __init__(self, *, vocabulary: int, exact: bool) -> None:
        """`vocabulary`: tokens that this rank has the logits of. `exact`: what is in fp64 are sums."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._vocabulary, self._exact = vocabulary, exact
        self._phase: Kind | None = Kind.start
        self._kinds: list[Kind] = []
        self._changes: list[tuple[int, int]] = []
        self._numbers: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return _one(args[0].dtype)
        if DTensor in types:
            return NotImplemented  # what it computes on its part comes here by itself
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor) and tensor.device.type != "meta":
                self._enter(tensor)
        if func is torch.ops.c10d.recv_.default:
            self.claim(args[0], Kind.buffers)
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the body operations and resized storages are noted."""
        before = torch.UntypedStorage.resize_

        @wraps(before)
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = before(storage, size)
            if (number := self._numbers.get(storage._cdata)) is not None:
                self._kinds[number] = Kind.gathered  # nothing but fully_shard has storages that come and go
                self._change(number, storage.nbytes())
            return done

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]  # not an operation, so nothing else tells of it
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]

    @contextmanager
    def during(self, phase: Kind | None) -> Iterator[None]:
        """What is made in the body is for `phase`; None: for the passes."""
        before, self._phase = self._phase, phase
        yield
        self._phase = before

    def claim(self, tensors: Iterable[Tensor | None], kind: Kind) -> None:
        """Note what `tensors` are for."""
        for tensor in tensors:
            if tensor is not None:
                self._kinds[self._enter(_local(tensor))] = kind

    def gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note what the gradients of `parameters` are, whenever a backward pass has made one."""
        for parameter in (one for one in parameters if one.requires_grad):
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda made: self.claim([made.grad], Kind.gradients)
            )

    def mark(self) -> int:
        """Return the place in the book at which it is now."""
        return len(self._changes)

    def peak(self, since: int = 0, until: int | None = None) -> Peak:
        """Return the peak between two places in the book."""
        now, highest, at = 0, -1, 0
        for place, (_, change) in enumerate(self._changes[:until], 1):
            now += change
            if now > highest and place >= since:
                highest, at = now, place
        parts: Counter[Kind] = Counter()
        for number, change in self._changes[:at]:
            parts[self._kinds[number]] += change
        return Peak(highest, {kind: parts[kind] for kind in Kind if parts[kind]})

    def _enter(self, tensor: Tensor) -> int:
        """Return the number of the tensor's storage, which is written down if it is new."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._numbers:
            number = self._numbers[key] = len(self._kinds)
            self._kinds.append(self._kind(tensor))
            self._change(number, storage.nbytes())
            self._watched[key] = weakref.ref(storage, lambda _: self._leave(key))
        return self._numbers[key]

    def _leave(self, key: int) -> None:
        del self._watched[key]
        self._change(self._numbers.pop(key), 0)

    def _change(self, number: int, size: int) -> None:
        before = self._sizes.get(number, 0)
        self._sizes[number] = size
        self._changes.append((number, size - before))

    def _kind(self, tensor: Tensor) -> Kind:
        if self._phase is Kind.start:
            return Kind.start
        if self._exact and tensor.dtype is torch.float64 and tensor.dim():
            return Kind.sums
        if tensor.dim() > 1 and tensor.shape[-1] == self._vocabulary and tensor.is_floating_point():
            return Kind.logits
        if self._phase is not None:
            return self._phase
        # A layer that is computed anew for its backward pass makes activations there, with gradients enabled.
        in_backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()
        return Kind.backward if in_backward else Kind.activations


def _one(kind: torch.dtype) -> float | int | bool:
    return True if kind is torch.bool else 1.0 if kind.is_floating_point else 1


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
