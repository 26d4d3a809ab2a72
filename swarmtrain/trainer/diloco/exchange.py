"""The mean pseudo-gradient of all learners: each learner's is encoded once, gathered on all ranks, and summed there in a fixed order.

The pseudo-gradient of a learner is the global parameters minus its own. Since every learner's is encoded, also those on this rank, and the
sum is in the order of the learners, the mean has the same bits however the learners are divided over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from swarmtrain.config.schema.optimizer import Quantization
from swarmtrain.trainer.diloco.learner import Learner
from swarmtrain.trainer.diloco.quantization import compute_encoded_size, decode_tensor, encode_tensor

_BUCKET_ELEMENTS = 1 << 23
"""Maximum number of elements that are gathered at a time: 32 MiB of float32. A larger tensor has a bucket of its own."""


class PseudoGradientExchange:
    """Computes the mean pseudo-gradient. Every rank has the same."""

    def __init__(self, learners_by_group: Sequence[range], group: dist.ProcessGroup | None, quantization: Quantization) -> None:
        """`learners_by_group`: the learners of each learner group. `group`: process group with one rank of each, in order; None for one."""
        self._learners_by_group, self._group, self._quantization = learners_by_group, group, quantization

    def compute_bytes_per_learner(self, parameters: Mapping[str, Tensor]) -> int:
        """Return the number of bytes that each learner contributes in a round."""
        return sum(compute_encoded_size(each.numel(), each.dtype, self._quantization) for each in parameters.values())

    @torch.no_grad()
    def compute_mean(self, global_parameters: Mapping[str, Tensor], local_learners: Sequence[Learner]) -> dict[str, Tensor]:
        """Return the mean pseudo-gradient of all learners by parameter name. Changes no state. Collective: all ranks must call it."""
        means: dict[str, Tensor] = {}
        for names in _divide_into_buckets(global_parameters):
            sizes = [
                compute_encoded_size(global_parameters[name].numel(), global_parameters[name].dtype, self._quantization) for name in names
            ]
            starts = list(accumulate(sizes, initial=0))
            encoded = self._gather(
                [
                    torch.cat([encode_tensor(global_parameters[name] - learner.parameters[name], self._quantization) for name in names])
                    for learner in local_learners
                ]
            )
            for name, (start, end) in zip(names, pairwise(starts), strict=True):
                like = global_parameters[name]
                total = torch.zeros_like(like)
                for each in encoded:
                    total += decode_tensor(each[start:end], like.shape, like.dtype, self._quantization)
                means[name] = total.div_(len(encoded))
        return means

    def _gather(self, local: Sequence[Tensor]) -> list[Tensor]:
        """Return the bytes of each learner, in the order of the learners, given those of this rank's learners."""
        if self._group is None:
            return list(local)
        most = max(map(len, self._learners_by_group))
        stacked = torch.stack([*local, *[torch.zeros_like(local[0])] * (most - len(local))])
        gathered = stacked.new_empty((len(self._learners_by_group), *stacked.shape))
        dist.all_gather_into_tensor(gathered.flatten(0, 1), stacked, group=self._group)
        return [rows[index] for rows, learners in zip(gathered, self._learners_by_group, strict=True) for index in range(len(learners))]


def _divide_into_buckets(parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
    """Yield the names of consecutive parameters that are gathered together."""
    names: list[str] = []
    count = 0
    for name, parameter in parameters.items():
        if names and count + parameter.numel() > _BUCKET_ELEMENTS:
            yield names
            names, count = [], 0
        names.append(name)
        count += parameter.numel()
    yield names
