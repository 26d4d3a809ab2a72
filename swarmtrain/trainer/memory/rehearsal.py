"""A step of one rank that moves no data: the real model, optimizer and passes, on tensors that have a shape and nothing else.

The other ranks are not there either: collectives of the backend `fake` return at once. So a rank of any world can be
tried on any machine, in the memory and the seconds of one process, and it runs the very code that will train.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from swarmtrain.config import Config
from swarmtrain.config.transformer_architecture import Precision
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.rows import Rows
from swarmtrain.trainer.data.samples import Batch, Samples
from swarmtrain.trainer.guard import StopFlag
from swarmtrain.trainer.memory.ledger import Kind, Ledger, Peak
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer, Update
from swarmtrain.trainer.parallel import ParallelModel, mesh, parallelize
from swarmtrain.trainer.parallel.data import Replicas
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import make_step


def rehearse(config: Config, size: int, rank: int) -> tuple[Peak, Peak]:
    """Return the peaks of memory while `rank` of a world of `size` starts, and in its steps.

    Raises WorldError if the world's size does not fit the config's topology, and whatever torch raises where it cannot
    do without data.
    """
    # A compiler wants real numbers, and the size of weights is known without reading them.
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"compile": False, "init_from": None})})
    here = Runtime(config, rank, size, 0, torch.device("cpu"), run="rehearsal", node="node0", board=None)
    shape = config.transformer_architecture
    ledger = Ledger(vocabulary=shape.vocab_size // config.topology.tensor, exact=shape.precision is Precision.float32)
    with _world(rank, size), FakeTensorMode(allow_non_fake_inputs=True), ledger.watching():
        model = parallelize(Transformer(shape, config.trainer.seed), here)
        if isinstance(model.replicas, Replicas):
            model.replicas._ddp.reducer = _Buckets(model.replicas._ddp.reducer)  # type: ignore[assignment]  # it does what is asked of it
        optimizer = _Watched(model, config, ledger)
        started = ledger.mark()
        with ledger.during(None):
            make_step(here, model, optimizer, _Nothing(config), position=0, number=1, stop=StopFlag())
        return ledger.peak(0, started), ledger.peak(started)


class _Watched(Optimizer):
    """An optimizer that tells the ledger what is whose."""

    def __init__(self, model: ParallelModel, config: Config, ledger: Ledger) -> None:
        super().__init__(model, config)
        self._ledger = ledger
        ledger.claim([*model.local.buffers(), *model.parameters.values()], Kind.parameters)
        ledger.claim(self.moments().values(), Kind.state)
        ledger.gradients(model.local.parameters())

    def prepare(self, number: int, *beside: Tensor) -> Update:
        self._ledger.claim([parameter.grad for parameter in self.parameters.values()], Kind.gradients)
        with self._ledger.during(Kind.step):
            return super().prepare(number, *beside)

    def step(self, number: int) -> Update:
        with self._ledger.during(Kind.step):
            return super().step(number)


class _Nothing(Samples):
    """Samples of the right shape, of no file."""

    def __init__(self, config: Config) -> None:
        shape = config.transformer_architecture
        self.sequence_length = shape.sequence_length
        self.rows = config.data.rows
        self._numbered = shape.reset_attention_mask or shape.reset_position_ids

    def batch(self, position: int, count: int) -> Batch:
        return Batch(np.arange(position, position + count), self.targets(range(count)), self.counted(np.arange(count)))

    def targets(self, ids: Sized) -> int:
        return self.rows * len(ids) * self.sequence_length

    def load(self, ids: Ids) -> Rows:
        made: list[Tensor] = [torch.zeros((self.rows * len(ids), self.sequence_length), dtype=torch.int64) for _ in range(3)]
        return Rows(made[0], made[1], made[2] if self._numbered else None)

    def expect(self, ids: Ids) -> None:
        """Nothing is on a disk."""


class _Buckets:
    """DDP's reducer, but that it does not put its buckets into another order, for which it would read what ranks have agreed on."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def _world(rank: int, size: int) -> Iterator[None]:
    """In the body this process is `rank` of a world of `size`, of which there is no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with warnings.catch_warnings(action="ignore"), _replaced(_for_real, (mesh, "build"), *((DeviceMesh, name) for name in _MESH)):
            yield
    finally:
        dist.destroy_process_group()
        # DTensor remembers layouts with their mesh, and takes a mesh of another world or rank that looks the same for it.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


_MESH = "__init__", "__getitem__", "get_coordinate"
"""What a mesh computes with tensors, and must know."""


def _for_real(function: Callable[..., Any]) -> Callable[..., Any]:
    def computed(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return computed


@contextmanager
def _replaced(make: Callable[[Callable[..., Any]], Callable[..., Any]], *places: tuple[Any, str]) -> Iterator[None]:
    before = [vars(owner).get(name) for owner, name in places]
    for owner, name in places:
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            delattr(owner, name) if function is None else setattr(owner, name, function)
