"""Simulation of one rank's step without data: the real model, optimizer and forward and backward passes, on fake tensors.

Other ranks are not needed: collectives of torch's `fake` backend return immediately. So any rank of a run of any size can be simulated on
any machine in one process, with the same code as in training.
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
from swarmtrain.config.schema.transformer_architecture import Precision
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.data.token_batch import TokenBatch
from swarmtrain.trainer.health.stop_flag import StopFlag
from swarmtrain.trainer.memory.allocation_tracker import AllocationKind, AllocationTracker, MemoryPeak
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.optim import Optimizer, OptimizerUpdate
from swarmtrain.trainer.parallel import ParallelModel, mesh
from swarmtrain.trainer.parallel.ddp import DdpModel
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import Runtime
from swarmtrain.trainer.step import train_step


def simulate_memory_peaks(config: Config, world_size: int, rank: int) -> tuple[MemoryPeak, MemoryPeak]:
    """Return the memory peaks of `rank` in a run with `world_size` ranks: during startup, and during a step.

    Raises WorldError if the number of ranks does not match the config's topology, and any error that torch raises if an operation needs
    real data.
    """
    # Compilation needs real data. Weights are not read: their sizes are known from the architecture.
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"compile": False, "init_from": None})})
    runtime = Runtime(config, rank, world_size, 0, torch.device("cpu"), run_name="simulation", node="node0", coordinator_address=None)
    architecture = config.transformer_architecture
    tracker = AllocationTracker(
        vocabulary_size=architecture.vocab_size // config.topology.tensor_parallel_size,
        has_fp64_sums=architecture.precision is Precision.float32,
    )
    with _init_fake_process_group(rank, world_size), FakeTensorMode(allow_non_fake_inputs=True), tracker.track_allocations():
        model = parallelize(Transformer(architecture, config.trainer.seed), runtime)
        if isinstance(model.wrapped_model, DdpModel):
            model.wrapped_model._ddp.reducer = _StaticBucketReducer(model.wrapped_model._ddp.reducer)  # type: ignore[assignment]  # it delegates everything else
        optimizer = _TrackedOptimizer(model, config, tracker)
        startup_end = tracker.get_allocation_history_position()
        with tracker.attribute_allocations_to_phase(None):
            train_step(runtime, model, optimizer, _SyntheticSamples(config), first_sample_position=0, step=1, stop_flag=StopFlag())
        return tracker.find_memory_peak(0, startup_end), tracker.find_memory_peak(startup_end)


class _TrackedOptimizer(Optimizer):
    """Optimizer that records the allocation kinds of its tensors in the allocation history."""

    def __init__(self, model: ParallelModel, config: Config, tracker: AllocationTracker) -> None:
        super().__init__(model, config)
        self._tracker = tracker
        tracker.assign_allocation_kind([*model.local_model.buffers(), *model.parameters.values()], AllocationKind.parameters)
        tracker.assign_allocation_kind(self.collect_state_tensors().values(), AllocationKind.optimizer_state)
        tracker.track_gradients(model.local_model.parameters())

    def prepare_step(self, number: int, *extra_scalars: Tensor) -> OptimizerUpdate:
        self._tracker.assign_allocation_kind([parameter.grad for parameter in self.parameters.values()], AllocationKind.gradients)
        with self._tracker.attribute_allocations_to_phase(AllocationKind.optimizer_step):
            return super().prepare_step(number, *extra_scalars)

    def step(self, step_number: int) -> OptimizerUpdate:
        with self._tracker.attribute_allocations_to_phase(AllocationKind.optimizer_step):
            return super().step(step_number)


class _SyntheticSamples(TokenDataset):
    """Data set of empty samples with the config's shapes, without token files."""

    def __init__(self, config: Config) -> None:
        architecture = config.transformer_architecture
        self.sequence_length = architecture.sequence_length
        self.rows_per_sample = config.data.rows_per_sample
        self._has_documents = architecture.reset_attention_mask or architecture.reset_position_ids

    def build_batch(self, position: int, count: int) -> GlobalBatch:
        return GlobalBatch(
            np.arange(position, position + count), self.count_loss_tokens(range(count)), self.compute_loss_denominator(np.arange(count))
        )

    def count_loss_tokens(self, ids: Sized) -> int:
        return self.rows_per_sample * len(ids) * self.sequence_length

    def load_samples(self, ids: Ids) -> TokenBatch:
        tensors: list[Tensor] = [torch.zeros((self.rows_per_sample * len(ids), self.sequence_length), dtype=torch.int64) for _ in range(3)]
        return TokenBatch(tensors[0], tensors[1], tensors[2] if self._has_documents else None)

    def prefetch_samples(self, ids: Ids) -> None:
        """Do nothing, since no token file exists."""


class _StaticBucketReducer:
    """DDP's reducer with buckets that are never rebuilt: rebuilding reads data from other ranks, which the simulation does not run."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def _init_fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Context manager in which this process is rank `rank` of a simulated world of `world_size` ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            _patch_functions(_wrap_to_use_real_tensors, (mesh, "build_mesh"), *((DeviceMesh, name) for name in _MESH_METHODS)),
        ):
            yield
    finally:
        dist.destroy_process_group()
        # DTensor caches sharding decisions by mesh, and confuses meshes of different worlds or ranks that compare equal.
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


_MESH_METHODS = "__init__", "__getitem__", "get_coordinate"
"""Methods of DeviceMesh that compute with tensor values, so they need real tensors."""


def _wrap_to_use_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    def call_with_real_tensors(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **options)

    return call_with_real_tensors


@contextmanager
def _patch_functions(wrap: Callable[[Callable[..., Any]], Callable[..., Any]], *targets: tuple[Any, str]) -> Iterator[None]:
    originals = [vars(owner).get(name) for owner, name in targets]
    for owner, name in targets:
        setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        for (owner, name), function in zip(targets, originals, strict=True):
            delattr(owner, name) if function is None else setattr(owner, name, function)
