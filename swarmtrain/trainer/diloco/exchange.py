"""The mean pseudo-gradient of all learners: each learner's is encoded once, gathered on all ranks, and summed there in a fixed order.

The pseudo-gradient of a learner is the global parameters minus its own. Since every learner's is encoded, also those on this rank, and the
sum is in the order of the learners, the mean has the same bits however the learners are divided over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.config.schema.optimizer import Quantization
from swarmtrain.trainer import collectives
from swarmtrain.trainer.diloco.quantization import compute_encoded_size, decode_tensor, encode_tensor

MAX_BUCKET_ELEMENTS = 1 << 23
"""Maximum number of elements that are gathered at a time: 32 MiB of float32."""


class PseudoGradientExchange:
    """Computes mean pseudo-gradients. Every rank has the same."""

    def __init__(self, learners_by_group: Sequence[range], group: dist.ProcessGroup | None, quantization: Quantization) -> None:
        """`learners_by_group`: the learners of each learner group. `group`: process group with one rank of each, in order; None for one."""
        self._learners_by_group, self._group, self._quantization = learners_by_group, group, quantization

    def compute_bytes_per_learner(self, parameters: Mapping[str, Tensor]) -> int:
        """Return the number of bytes that each learner contributes to the mean pseudo-gradient of `parameters`."""
        return sum(compute_encoded_size(each.shape, each.dtype, self._quantization) for each in parameters.values())

    @torch.no_grad()
    def start(self, pseudo_gradients: Sequence[Mapping[str, Tensor]]) -> PendingMean:
        """Start to gather the pseudo-gradients of all learners, given those of this rank's learners by parameter name. Collective."""
        local = [torch.cat([encode_tensor(each, self._quantization) for each in learner.values()]) for learner in pseudo_gradients]
        like = pseudo_gradients[0]
        if self._group is None:
            return PendingMean(local, (), like, self._quantization)
        most = max(map(len, self._learners_by_group))
        stacked = torch.stack([*local, *[torch.zeros_like(local[0])] * (most - len(local))])
        gathered = stacked.new_empty((len(self._learners_by_group), *stacked.shape))
        pieces = torch.split(stacked.flatten(), collectives.MESSAGE_BYTES)
        outputs = torch.split(gathered.flatten(1), collectives.MESSAGE_BYTES, dim=1)
        works = [
            dist.all_gather(list(output.unbind()), piece, group=self._group, async_op=True)
            for output, piece in zip(outputs, pieces, strict=True)
        ]
        encoded = [rows[index] for rows, learners in zip(gathered, self._learners_by_group, strict=True) for index in range(len(learners))]
        return PendingMean(encoded, works, like, self._quantization)


@dataclass(frozen=True)
class PendingMean:
    """A mean pseudo-gradient whose parts are being gathered."""

    encoded: Sequence[Tensor]
    """The bytes of each learner, in the order of the learners. They are valid once `works` are complete."""
    works: Sequence[dist.Work]
    """The collectives that gather the bytes; none if this rank has all learners."""
    like: Mapping[str, Tensor]
    """A tensor with the shape and type of each pseudo-gradient, by parameter name."""
    quantization: Quantization

    @torch.no_grad()
    def wait(self) -> dict[str, Tensor]:
        """Wait until all parts are gathered, and return the mean by parameter name."""
        for work in self.works:
            work.wait()
        means, start = {}, 0
        for name, like in self.like.items():
            end = start + compute_encoded_size(like.shape, like.dtype, self.quantization)
            total = torch.zeros_like(like)
            for each in self.encoded:
                total += decode_tensor(each[start:end], like.shape, like.dtype, self.quantization)
            means[name], start = total.div_(len(self.encoded)), end
        return means


def divide_into_buckets(parameters: Mapping[str, Tensor], max_elements: int) -> list[list[str]]:
    """Return the names of consecutive parameters that are gathered together. A parameter of more elements has a bucket of its own."""
    buckets: list[list[str]] = []
    count = 0
    for name, parameter in parameters.items():
        if not buckets or count + parameter.numel() > max_elements:
            buckets.append([])
            count = 0
        buckets[-1].append(name)
        count += parameter.numel()
    return buckets
