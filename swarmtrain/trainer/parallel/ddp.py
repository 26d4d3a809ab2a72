"""Data parallelism: DistributedDataParallel over the mesh's data group, with summed instead of averaged gradients.

The loss is a sum over tokens divided by the global number of tokens, so the gradients of micro batches are summed, regardless of the
replica that computes them.

With float32 parameters, gradients are summed in float64. Sums of a small number of 24-bit significands are exact in 53 bits, so the
result depends neither on the order of additions nor on the number of replicas: a run on three nodes has exactly the same losses as a
run on one. In float32, a difference in the last bit would grow to one in the second digit of the loss within a few hundred steps. Float64
sums double the network traffic.

For slow networks, gradient_compression sums gradients over replicas with fewer bytes, and less exactly.

In bfloat16 and float16 the losses cannot be exactly equal anyway, so the gradients, which are in the lower precision, are summed in
float32. A sum of two numbers is rounded only once, so a float32 step of at most two micro batches needs no float64 sums.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch._dynamo  # DDP and optimizers import it on first use, over 1 s; here a forkserver imports it once for all ranks
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swarmtrain.config import Config
from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.model.transformer import Transformer
from swarmtrain.trainer.parallel.gradient_compression import build_gradient_compressor
from swarmtrain.trainer.parallel.mesh import Mesh
from swarmtrain.trainer.parallel.working_weights import GradientSums, WorkingWeights, call_after_each_gradient

_GPU_BUCKET_MEGABYTES = 100
"""Size of the gradients that are summed by one all-reduce between GPUs, as in torchtitan. torch's 25 MB are for slower networks."""


class SingleReplicaModel:
    """A model with one replica: its gradients need no reduction over ranks."""

    micro_batches_per_step = 1

    def __init__(self, model: Transformer, *, sum_dtype: torch.dtype | None) -> None:
        """Wrap `model`. `sum_dtype`: sum the gradients of micro batches in this type; None: in that of the gradients."""
        self._model, self._weights = model, WorkingWeights(model)
        self._sums = GradientSums(self._weights, sum_dtype) if sum_dtype else None
        self._is_last_pass = False
        if sum_dtype:
            call_after_each_gradient(self._weights.weights, self._process_gradient)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of the model's parameters."""
        return self._weights.parameters

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch, as a tensor for the backward pass (see Transformer.forward)."""
        loss: Tensor = self._model(tokens, targets, documents)
        return loss

    @contextmanager
    def accumulate_micro_batch_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Context manager for the forward and backward pass of one micro batch.

        After the last micro batch of a step, gradients are the sums over all its micro batches.
        """
        self._is_last_pass = is_last
        yield
        if is_last and self._sums:
            self._sums.move_to_parameters()

    def _process_gradient(self, weight: Tensor) -> None:
        """Add the gradient of `weight` to its sum, as soon as a backward pass has computed it."""
        if self._sums:
            self._sums.add_gradient(weight)
        if self._is_last_pass:
            self._weights.free_weight(weight)


class DdpModel:
    """A model wrapped in DistributedDataParallel: gradients are summed over the ranks of the data group."""

    micro_batches_per_step = 1
    """Minimum number of micro batches that each rank runs in a step. Ranks with fewer run empty ones: all must join the all-reduce."""

    def __init__(self, model: Transformer, config: Config, mesh: Mesh, device: torch.device, *, sum_dtype: torch.dtype | None) -> None:
        """Wrap `model` in DistributedDataParallel.

        `sum_dtype`: sum the gradients of micro batches and replicas in this type; None: in that of the gradients.
        """
        self._weights = WorkingWeights(model)
        self._sums = GradientSums(self._weights, sum_dtype) if sum_dtype else None
        self._group = mesh.data_parallel_group
        self.compressor = build_gradient_compressor(config, dict(model.named_parameters()), self._group)
        """Compression of gradients over replicas; None for exact sums."""
        self._compressed_buckets: list[tuple[Tensor, Tensor, dict[Tensor, Tensor]]] = []
        self._ddp = DistributedDataParallel(
            model,
            process_group=self._group,
            init_sync=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=_GPU_BUCKET_MEGABYTES if device.type == "cuda" else None,
        )
        # Buffers are constant tables, the same on every rank; DDP would broadcast them before every forward pass. Set as an attribute,
        # because torch has renamed the argument.
        self._ddp.broadcast_buffers = False
        self._ddp.register_comm_hook(self, _reduce_bucket_hook)
        self._is_last_pass = False
        if self._weights.are_copies:
            call_after_each_gradient(self._weights.weights, self._free_used_weight)
        # When the second pass begins, DDP rebuilds its buckets in the order in which gradients became ready. That changes the order of
        # additions: the first step of a resumed run would differ in the last bits from the same step of an uninterrupted run. So one empty
        # pass runs before the first step.
        length = mesh.tensor_size * (2 * mesh.context_mesh.size() if mesh.context_mesh else 1)
        empty_batch = torch.zeros((config.data.rows_per_sample, length), dtype=torch.int64, device=device)
        with torch.autograd.set_detect_anomaly(False):  # parameters may have no values yet
            torch.autograd.backward(self(empty_batch, torch.full_like(empty_batch, IGNORE_INDEX)).sum())
        for tensor in (*self._weights.weights, *self.parameters):
            tensor.grad = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of the model's parameters."""
        return self._weights.parameters

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch, as a tensor for the backward pass (see Transformer.forward)."""
        loss: Tensor = self._ddp(tokens, targets, documents)
        return loss

    @contextmanager
    def accumulate_micro_batch_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Context manager for the forward and backward pass of one micro batch.

        After the last micro batch of a step, gradients are the sums over all micro batches of all replicas.
        """
        self._is_last_pass = is_last
        if is_last:
            yield
            self._finish_compressed_sums()
            for weight in self._weights.weights if self._weights.are_copies else ():
                weight.grad = None
            return
        with self._ddp.no_sync():
            yield
        if self._sums:
            for weight in self._weights.weights:
                self._sums.add_gradient(weight)

    def _free_used_weight(self, weight: Tensor) -> None:
        if self._is_last_pass:
            self._weights.free_weight(weight)

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket of gradients over the data group. Return a future of the bucket's buffer.

        The sums are the gradients of the parameters: where these are the weights, through the buffer.
        """
        buffer = bucket.buffer()
        sums = buffer.to(self._sums.dtype) if self._sums else buffer
        sums_by_weight = {}
        for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            start = gradient.storage_offset() - buffer.storage_offset()
            sums_by_weight[weight] = sums[start : start + gradient.numel()]
            if self._sums and (previous_sum := self._sums.take_sum(weight)) is not None:
                sums_by_weight[weight] += previous_sum.flatten()
        if self.compressor and self.compressor.is_active:
            self.compressor.start_sum(sums_by_weight)
            self._compressed_buckets.append((buffer, sums, sums_by_weight))
            completed: torch.futures.Future[Tensor] = torch.futures.Future()
            completed.set_result(buffer)
            return completed
        work = dist.all_reduce(sums, group=self._group, async_op=True)

        def set_reduced_gradients(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            reduced.value()  # re-raises an error of the all-reduce, which would be lost otherwise
            return self._set_gradients(buffer, sums, sums_by_weight)

        future: torch.futures.Future[Tensor] = work.get_future().then(set_reduced_gradients)
        return future

    def _finish_compressed_sums(self) -> None:
        """Wait until compressed gradients are summed over replicas, and make the sums the gradients of the parameters."""
        if self.compressor and self.compressor.is_active:
            self.compressor.finish_sums()
        for buffer, sums, sums_by_weight in self._compressed_buckets:
            self._set_gradients(buffer, sums, sums_by_weight)
        self._compressed_buckets.clear()

    def _set_gradients(self, buffer: Tensor, sums: Tensor, sums_by_weight: Mapping[Tensor, Tensor]) -> Tensor:
        """Make the sums of a bucket the gradients of its parameters, and return its `buffer`, which has the gradients of the weights."""
        if not self._weights.are_copies:
            return buffer.copy_(sums)
        for weight, total in sums_by_weight.items():
            parameter = self._weights.get_parameter(weight)
            parameter.grad = total.view_as(parameter)
        return buffer


def _reduce_bucket_hook(ddp_model: DdpModel, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return ddp_model.reduce_bucket(bucket)
