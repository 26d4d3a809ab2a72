"""Data parallelism: DistributedDataParallel over the mesh's data group, with summed instead of averaged gradients.

The loss is a sum over tokens divided by the global number of tokens, so the gradients of micro batches are summed, regardless of the
replica that computes them.

With float32 parameters, gradients are summed in float64. Sums of a small number of 24-bit significands are exact in 53 bits, so the
result depends neither on the order of additions nor on the number of replicas: a run on three nodes has exactly the same losses as a
run on one. In float32, a difference in the last bit would grow to one in the second digit of the loss within a few hundred steps. Float64
sums double the network traffic.

With bfloat16 the losses cannot be exactly equal anyway, so gradients are summed in float32. A sum of two numbers is rounded only once, so
a step of at most two micro batches needs no float64 sums.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch._dynamo  # DDP and optimizers import it on first use, over 1 s; here a forkserver imports it once for all ranks
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swarmtrain.trainer.model.loss_targets import IGNORE_INDEX
from swarmtrain.trainer.parallel.mesh import Mesh


class SingleReplicaModel:
    """A model with one replica: its gradients need no reduction over ranks."""

    micro_batches_per_step = 1

    def __init__(self, model: nn.Module, *, sum_in_fp64: bool) -> None:
        """Wrap `model`. `sum_in_fp64`: sum the gradients of micro batches in float64."""
        self._model, self._sum_in_fp64 = model, sum_in_fp64
        self.parameters = list(model.parameters())
        self._accumulated_gradients: dict[Tensor, Tensor] = {}

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch, as a tensor for the backward pass (see Transformer.forward)."""
        loss: Tensor = self._model(tokens, targets, documents)
        return loss

    @contextmanager
    def accumulate_micro_batch_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Context manager for the forward and backward pass of one micro batch.

        After the last micro batch of a step, gradients are the sums over all its micro batches.
        """
        yield
        if not is_last and self._sum_in_fp64:
            _accumulate_gradients(self.parameters, self._accumulated_gradients)
        elif is_last:
            for parameter, total in self._accumulated_gradients.items():
                parameter.grad = total.add_(_flatten_gradient(parameter)).to(parameter.dtype).view_as(parameter)
            self._accumulated_gradients.clear()


class DdpModel:
    """A model wrapped in DistributedDataParallel: gradients are summed over the ranks of the data group."""

    micro_batches_per_step = 1
    """Minimum number of micro batches that each rank runs in a step. Ranks with fewer run empty ones: all must join the all-reduce."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, *, rows_per_sample: int, sum_in_fp64: bool) -> None:
        """Wrap `model` in DistributedDataParallel.

        `rows_per_sample`: number of rows per sample. `sum_in_fp64`: sum the gradients of micro batches and replicas in float64.
        """
        self._sum_in_fp64 = sum_in_fp64
        self.parameters = list(model.parameters())
        self._accumulated_gradients: dict[Tensor, Tensor] = {}
        self._group = mesh.data_parallel_group
        self._ddp = DistributedDataParallel(model, process_group=self._group, init_sync=False, gradient_as_bucket_view=True)
        # Buffers are constant tables, the same on every rank; DDP would broadcast them before every forward pass. Set as an attribute,
        # because torch has renamed the argument.
        self._ddp.broadcast_buffers = False
        self._ddp.register_comm_hook(self, _reduce_bucket_hook)
        # When the second pass begins, DDP rebuilds its buckets in the order in which gradients became ready. That changes the order of
        # additions: the first step of a resumed run would differ in the last bits from the same step of an uninterrupted run. So one empty
        # pass runs before the first step.
        length = mesh.tensor_size * (2 * mesh.context_mesh.size() if mesh.context_mesh else 1)
        empty_batch = torch.zeros((rows_per_sample, length), dtype=torch.int64, device=device)
        torch.autograd.backward(self(empty_batch, torch.full_like(empty_batch, IGNORE_INDEX)).sum())
        self._ddp.zero_grad()

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch, as a tensor for the backward pass (see Transformer.forward)."""
        loss: Tensor = self._ddp(tokens, targets, documents)
        return loss

    @contextmanager
    def accumulate_micro_batch_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Context manager for the forward and backward pass of one micro batch.

        After the last micro batch of a step, gradients are the sums over all micro batches of all replicas.
        """
        if is_last:
            yield
            return
        with self._ddp.no_sync():
            yield
        if self._sum_in_fp64:
            _accumulate_gradients(self.parameters, self._accumulated_gradients)

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket of gradients over the data group. Return a future of the bucket's buffer with the sums."""
        buffer = bucket.buffer()
        sums = buffer.double() if self._sum_in_fp64 else buffer
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._accumulated_gradients:
                start = gradient.storage_offset() - buffer.storage_offset()
                sums[start : start + gradient.numel()] += self._accumulated_gradients.pop(parameter)
        work = dist.all_reduce(sums, group=self._group, async_op=True)

        def copy_reduced_gradients(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            reduced.value()  # re-raises an error of the all-reduce, which would be lost otherwise
            return buffer.copy_(sums)

        future: torch.futures.Future[Tensor] = work.get_future().then(copy_reduced_gradients)
        return future


def _reduce_bucket_hook(ddp_model: DdpModel, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return ddp_model.reduce_bucket(bucket)


def _accumulate_gradients(parameters: Sequence[Tensor], sums: dict[Tensor, Tensor]) -> None:
    """Accumulate the gradients of one micro batch in `sums`, in float64, and clear the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter in sums:
                sums[parameter] += _flatten_gradient(parameter)
            else:
                sums[parameter] = _flatten_gradient(parameter).double()
            parameter.grad = None


def _flatten_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter did not contribute to the loss")
    return parameter.grad.reshape(-1)
