"""Data parallelism: DistributedDataParallel over the mesh's data group, with summed instead of averaged gradients.

The loss is a sum over tokens divided by the global number of tokens, so gradients of micro batches add up, whichever replica computed them.
In fp32 they are added in fp64: a small number of 24-bit significands adds up in 53 bits without rounding, so neither the order of additions
nor the number of replicas affects the result. Training amplifies a difference in the last bit to one in the second digit within some
hundred steps; with fp64 sums there is no difference, and a run on three nodes has exactly the losses of a run on one. It costs twice the
traffic. In bfloat16, where this exactness is not attainable anyway, sums are in fp32. A sum of two numbers is rounded once in any case, so
a step of two micro batches or fewer needs none of this.
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
    """A model without other replicas: its gradients need no reduction."""

    micro_batches_per_step = 1

    def __init__(self, model: nn.Module, *, sum_in_fp64: bool) -> None:
        """`sum_in_fp64`: add gradients in fp64."""
        self._model, self._sum_in_fp64 = model, sum_in_fp64
        self.parameters = list(model.parameters())
        self._gradient_sums: dict[Tensor, Tensor] = {}

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch (see Transformer.forward), ready for the backward pass."""
        loss: Tensor = self._model(tokens, targets, documents)
        return loss

    @contextmanager
    def accumulating_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Run the forward and backward pass of one micro batch in the body. After a step's last one, gradients are the sum of all."""
        yield
        if not is_last and self._sum_in_fp64:
            _accumulate_gradients(self.parameters, self._gradient_sums)
        elif is_last:
            for parameter, total in self._gradient_sums.items():
                parameter.grad = total.add_(_flatten_gradient(parameter)).to(parameter.dtype).view_as(parameter)
            self._gradient_sums.clear()


class DdpModel:
    """A model and its replicas on the other ranks of the data group, as one."""

    micro_batches_per_step = 1
    """Micro batches that every rank runs in a step at least, empty ones included: the all-reduce needs all ranks."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, *, sum_in_fp64: bool) -> None:
        """`sum_in_fp64`: add gradients in fp64."""
        self._sum_in_fp64 = sum_in_fp64
        self.parameters = list(model.parameters())
        self._gradient_sums: dict[Tensor, Tensor] = {}
        self._group = mesh.data_group
        self._ddp = DistributedDataParallel(model, process_group=self._group, init_sync=False, gradient_as_bucket_view=True)
        # Buffers are constant tables, the same on every rank; DDP would broadcast them before every forward pass. Set as an attribute,
        # because torch has renamed the argument.
        self._ddp.broadcast_buffers = False
        self._ddp.register_comm_hook(self, _reduce_bucket_hook)
        # When its second pass begins, DDP rebuilds its buckets in the order in which gradients became ready. That changes the order of
        # additions: a resumed run's first step would differ in the last bits from that of an uninterrupted run. So one empty pass runs
        # before the first.
        length = mesh.tensor_size * (2 * mesh.context_mesh.size() if mesh.context_mesh else 1)
        empty_batch = torch.zeros((2, length), dtype=torch.int64, device=device)  # two samples, since preference training needs a pair
        torch.autograd.backward(self(empty_batch, torch.full_like(empty_batch, IGNORE_INDEX)).sum())
        self._ddp.zero_grad()

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch (see Transformer.forward), ready for the backward pass."""
        loss: Tensor = self._ddp(tokens, targets, documents)
        return loss

    @contextmanager
    def accumulating_gradients(self, *, is_last: bool) -> Iterator[None]:
        """Run the forward and backward pass of one micro batch in the body. After a step's last one, every rank has the sum of all."""
        if is_last:
            yield
            return
        with self._ddp.no_sync():
            yield
        if self._sum_in_fp64:
            _accumulate_gradients(self.parameters, self._gradient_sums)

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket of gradients over the data group."""
        buffer = bucket.buffer()
        sums = buffer.double() if self._sum_in_fp64 else buffer
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._gradient_sums:
                start = gradient.storage_offset() - buffer.storage_offset()
                sums[start : start + gradient.numel()] += self._gradient_sums.pop(parameter)
        work = dist.all_reduce(sums, group=self._group, async_op=True)

        def copy_result(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            reduced.value()  # re-raises an error of the all-reduce, which would be lost otherwise
            return buffer.copy_(sums)

        future: torch.futures.Future[Tensor] = work.get_future().then(copy_result)
        return future


def _reduce_bucket_hook(replicas: DdpModel, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return replicas.reduce_bucket(bucket)


def _accumulate_gradients(parameters: Sequence[Tensor], sums: dict[Tensor, Tensor]) -> None:
    """Add the gradients of a micro batch to `sums`, in fp64, and clear them."""
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter in sums:
                sums[parameter] += _flatten_gradient(parameter)
            else:
                sums[parameter] = _flatten_gradient(parameter).double()
            parameter.grad = None


def _flatten_gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return parameter.grad.reshape(-1)
