"""A simulated rank: the real model, optimizer and forward and backward passes, on fake tensors, which have a shape but no data.

Other ranks are not needed: collectives of torch's `fake` backend return immediately. So any rank of a run of any size can be simulated on
any machine in one process, with the same code as in training. A SimulatedRankObserver sees each operation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from swarmtrain.config import Config
from swarmtrain.trainer.data.memory_map import Ids
from swarmtrain.trainer.data.samples import GlobalBatch, TokenDataset
from swarmtrain.trainer.data.token_batch import TokenBatch
from swarmtrain.trainer.memory.fused_rms_norm import fuse_rms_norm
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel import ParallelModel, mesh
from swarmtrain.trainer.parallel.ddp import DdpModel
from swarmtrain.trainer.parallelization import parallelize
from swarmtrain.trainer.runtime import Runtime


@contextmanager
def simulate_rank(config: Config, world_size: int, rank: int) -> Iterator[Runtime]:
    """Context manager in which this process is rank `rank` of `world_size` ranks, and new tensors are fake. Yield the rank's runtime."""
    # Compilation needs real data. Weights are not read: their sizes are known from the architecture.
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"compile": False, "init_from": None})})
    runtime = Runtime(config, rank, world_size, 0, torch.device("cpu"), run_name="simulation", node="node0", coordinator_address=None)
    with init_fake_process_group(rank, world_size), FakeTensorMode(allow_non_fake_inputs=True), fuse_rms_norm():
        yield runtime


def build_simulated_model(runtime: Runtime) -> ParallelModel:
    """Return the parallel model of the simulated rank `runtime`. Raises the errors of `parallelize`."""
    config = runtime.config
    model = parallelize(Transformer(config.transformer_architecture, config.trainer.seed), runtime, initialize=False)
    if isinstance(model.wrapped_model, DdpModel):
        model.wrapped_model._ddp.reducer = _StaticBucketReducer(model.wrapped_model._ddp.reducer)  # type: ignore[assignment]  # it delegates everything else
    return model


class SimulatedRankObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]  # not typed in torch
    """Dispatch mode that observes the operations of a simulated rank. Reading a scalar from a fake tensor returns a placeholder."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.observe_scalar_read(args[0])
            return _build_placeholder_scalar(args[0].dtype)
        if DTensor in types:
            return NotImplemented  # the operation on the DTensor's local shard is dispatched here as well
        result = func(*args, **(kwargs or {}))
        self.observe_operation(func, args, kwargs or {}, result)
        return result

    def observe_operation(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Observe the call of `operator` with `args` and `kwargs`, which has returned `result`."""

    def observe_scalar_read(self, tensor: Tensor) -> None:
        """Observe that the host reads the value of `tensor`, which has one element."""


def _build_placeholder_scalar(dtype: torch.dtype) -> float | int | bool:
    return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


class SyntheticSamples(TokenDataset):
    """Data set of empty samples with the config's shapes, without token files."""

    def __init__(self, config: Config) -> None:
        architecture = config.transformer_architecture
        self.sequence_length = architecture.sequence_length
        self.rows_per_sample, self.companion_datasets = config.data.rows_per_sample, []
        self._has_documents = architecture.reset_attention_mask or architecture.reset_position_ids

    def build_batch(self, position: int, count: int) -> GlobalBatch:
        ids = np.arange(position, position + count)
        return GlobalBatch(ids, self.count_loss_tokens(ids), self.compute_loss_denominator(ids))

    def count_loss_tokens_by_sample(self, ids: Ids) -> Ids:
        return np.full(len(ids), self.rows_per_sample * self.sequence_length)

    def load_samples(self, ids: Ids) -> TokenBatch:
        tensors: list[Tensor] = [torch.zeros((self.rows_per_sample * len(ids), self.sequence_length), dtype=torch.int64) for _ in range(3)]
        return TokenBatch(tensors[0], tensors[1], tensors[2] if self._has_documents else None)

    def start_loading(self, ids: Ids) -> None:
        """Do nothing, since no token file exists."""

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
def init_fake_process_group(rank: int, world_size: int) -> Iterator[None]:
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
