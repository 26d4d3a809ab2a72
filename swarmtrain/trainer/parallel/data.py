"""Data parallelism: DistributedDataParallel over the mesh's data group, summing instead of averaging.

The loss is a sum over tokens divided by the global number of tokens, so gradients of replicas add up, however many
micro batches each of them had.
"""

# No `from __future__ import annotations`: DDP compares the hook's annotations with the classes themselves.

import torch
import torch._dynamo  # DDP and optimizers import it when first used, over a second; here a forkserver does it once for all ranks
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from swarmtrain.trainer.model.transformer import IGNORE
from swarmtrain.trainer.parallel.mesh import Mesh


def replicate(model: nn.Module, mesh: Mesh, device: torch.device) -> DistributedDataParallel:
    """Return `model`, on `device`, so wrapped that a backward pass outside `no_sync` leaves the sum of all replicas' gradients."""
    replicated = DistributedDataParallel(model, process_group=mesh.data_group, init_sync=False, gradient_as_bucket_view=True)
    replicated.register_comm_hook(mesh.data_group, _sum)
    # DDP groups gradients anew, in the order in which they come, when its second pass begins. That changes the order of
    # additions: a resumed run's first step would differ in the last bits from that of a run that was never stopped. So
    # there is one pass before the first, with nothing in it.
    nothing = torch.zeros((1, 1), dtype=torch.int64, device=device)
    replicated(nothing, torch.full_like(nothing, IGNORE)).backward()
    replicated.zero_grad()
    return replicated


def _sum(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed
