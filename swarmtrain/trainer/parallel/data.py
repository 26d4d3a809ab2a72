"""Data parallelism: DistributedDataParallel over the mesh's data group, summing instead of averaging.

The loss is a sum over tokens divided by the global number of tokens, so gradients of micro batches add up, whichever
replica had them. In fp32 they are added in fp64: few numbers of 24 bits are added in 53 without rounding, so neither
the order of additions nor the number of replicas shows in the result. Training amplifies a difference in the last bit
to one in the second digit within some hundred steps; this way there is none, and a run on three nodes has the very
losses of a run on one. It costs twice the traffic; in bfloat16, where that is not to be had anyway, sums are in fp32.
A sum of two numbers is rounded once in any case, so a step of two micro batches or fewer needs none of this.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch._dynamo  # DDP and optimizers import it when first used, over a second; here a forkserver does it once for all ranks
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from swarmtrain.trainer.model.targets import IGNORE
from swarmtrain.trainer.parallel.mesh import Mesh


class Alone:
    """A model that has no copies: its gradients are nobody's to wait for."""

    passes = 1

    def __init__(self, model: nn.Module, *, exact: bool) -> None:
        """`exact`: add gradients in fp64."""
        self._model, self._exact = model, exact
        self.parameters = list(model.parameters())
        self._aside: dict[Tensor, Tensor] = {}

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch (see Transformer.forward), ready for the backward pass."""
        loss: Tensor = self._model(tokens, targets, documents)
        return loss

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward pass of one micro batch go in the body. After the last one of a step gradients are the sum of all."""
        yield
        if not last and self._exact:
            _set_aside(self.parameters, self._aside)
        elif last:
            for parameter, total in self._aside.items():
                parameter.grad = total.add_(_flat(parameter)).to(parameter.dtype).view_as(parameter)
            self._aside.clear()


class Replicas:
    """A model, and copies of it on the other ranks of the data group, as one."""

    passes = 1
    """Passes that every rank makes in a step, empty ones too: the others' sums need its part."""

    def __init__(self, model: nn.Module, mesh: Mesh, device: torch.device, *, exact: bool) -> None:
        """`exact`: add gradients in fp64."""
        self._exact = exact
        self.parameters = list(model.parameters())
        self._aside: dict[Tensor, Tensor] = {}
        self._group = mesh.data_group
        self._ddp = DistributedDataParallel(model, process_group=self._group, init_sync=False, gradient_as_bucket_view=True)
        # Buffers are tables of constants, the same everywhere; DDP would send them before every forward pass. Set here, since
        # torch has changed the argument's name.
        self._ddp.broadcast_buffers = False
        self._ddp.register_comm_hook(self, _reduce)
        # DDP groups gradients anew, in the order in which they come, when its second pass begins. That changes the order
        # of additions: a resumed run's first step would differ in the last bits from that of a run that was never
        # stopped. So there is one pass before the first, with nothing in it.
        length = mesh.tensor_size * (2 * mesh.context_mesh.size() if mesh.context_mesh else 1)
        nothing = torch.zeros((2, length), dtype=torch.int64, device=device)  # two samples, which may have to be a pair
        torch.autograd.backward(self(nothing, torch.full_like(nothing, IGNORE)).sum())
        self._ddp.zero_grad()

    def __call__(self, tokens: Tensor, targets: Tensor, documents: Tensor | None = None) -> Tensor:
        """Return the summed loss of a micro batch (see Transformer.forward), ready for the backward pass."""
        loss: Tensor = self._ddp(tokens, targets, documents)
        return loss

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Forward and backward pass of one micro batch go in the body. After the last one of a step every rank has the sum of all."""
        if last:
            yield
            return
        with self._ddp.no_sync():
            yield
        if self._exact:
            _set_aside(self.parameters, self._aside)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Add up a bucket of gradients over the data group."""
        narrow = bucket.buffer()
        sums = narrow.double() if self._exact else narrow
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if parameter in self._aside:
                start = gradient.storage_offset() - narrow.storage_offset()
                sums[start : start + gradient.numel()] += self._aside.pop(parameter)
        work = dist.all_reduce(sums, group=self._group, async_op=True)

        def copied(reduced: torch.futures.Future[list[Tensor]]) -> Tensor:
            reduced.value()  # raises what the reduction has raised, which nobody else would learn of
            return narrow.copy_(sums)

        done: torch.futures.Future[Tensor] = work.get_future().then(copied)
        return done


def _reduce(replicas: Replicas, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return replicas.reduce(bucket)


def _set_aside(parameters: Sequence[Tensor], aside: dict[Tensor, Tensor]) -> None:
    """Add the gradients of a micro batch to the sums `aside`, in fp64, and clear them."""
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter in aside:
                aside[parameter] += _flat(parameter)
            else:
                aside[parameter] = _flat(parameter).double()
            parameter.grad = None


def _flat(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter took no part in the loss")
    return parameter.grad.reshape(-1)
