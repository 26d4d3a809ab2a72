"""Whether replicas are still the same: they compute alike from the same sums, so that a bit that differs was flipped by a machine.

Nothing else would tell: each replica trains on, and the loss hides the difference for long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import agreement
from swarmtrain.trainer.optim import Optimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime

Part = tuple[str, int, tuple[int, ...]]
"""A tensor's name and which shard of it: its tensor-parallel rank, and its place along every sharded dimension of its mesh."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check(here: Runtime, model: ParallelModel, optimizer: Optimizer, number: int) -> None:
    """Compare parameters and optimizer state of all replicas after step `number`. Called by all ranks together.

    Raises TrainingError, naming ranks, nodes and tensors, if any bit of them differs.
    """
    whole = model.shards.whole
    tensors = {f"model/{name}": whole(name, parameter.detach()) for name, parameter in model.parameters.items()}
    tensors |= {f"optimizer/{name}": whole(name.partition("/")[2], tensor) for name, tensor in optimizer.moments().items()}
    parts = [(name, model.mesh.tensor_rank, _place(tensor)) for name, tensor in tensors.items()]
    prints = dict(zip(parts, bit_sums(list(tensors.values())), strict=True))
    nodes, prints_by_rank = zip(*agreement.gather((here.node, prints)), strict=True)
    for rank, (other, names) in differences(prints_by_rank).items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise TrainingError(
            f"rank {rank} on {nodes[rank]} has other numbers than rank {other} on {nodes[other]}, in {names[0]}{more}",
            place=f"step {number}",
            hint=f"a GPU or memory of {nodes[rank]} may be failing: leave it out of runner.hosts and go on from a checkpoint",
        )


def bit_sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the sum of its words of bits, modulo 2^64: any flipped bit changes it, the order of summing does not."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    device = max((tensor.device for tensor in local), key=lambda device: device.type != "cpu", default=torch.device("cpu"))
    sums = [tensor.contiguous().view(_WORDS[tensor.element_size()]).sum(dtype=torch.int64).to(device) for tensor in local]
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []


def differences(prints: Sequence[Mapping[Part, int]]) -> dict[int, tuple[int, list[str]]]:
    """Return the ranks that differ from most holders of the same parts: the lowest rank of these, and the tensors' names.

    `prints` has every rank's sums. Where no value is held by most, the lowest rank's counts.
    """
    holders: dict[Part, dict[int, int]] = {}
    for rank, sums in enumerate(prints):
        for part, value in sums.items():
            holders.setdefault(part, {})[rank] = value
    found: dict[int, tuple[int, list[str]]] = {}
    for part, values in holders.items():
        usual = Counter(values.values()).most_common(1)[0][0]
        other = next(rank for rank, value in values.items() if value == usual)
        for rank, value in values.items():
            if value != usual:
                found.setdefault(rank, (other, []))[1].append(part[0])
    return found


def _place(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    places = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return tuple(place for place, placement in places if isinstance(placement, Shard))
