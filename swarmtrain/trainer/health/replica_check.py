"""Check that all replicas have bitwise identical parameters and optimizer state.

Replicas run the same computation on the same reduced gradients, so different bits indicate a hardware fault. Nothing else would detect
it: each replica continues to train, and the loss does not show the difference for a long time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from swarmtrain.errors import TrainingError
from swarmtrain.trainer import collectives
from swarmtrain.trainer.optim import StatefulOptimizer
from swarmtrain.trainer.parallel import ParallelModel
from swarmtrain.trainer.runtime import Runtime

ShardKey = tuple[str, int, tuple[int, ...]]
"""Identifies a shard: tensor name, tensor-parallel rank, and the coordinate along every sharded dimension of the tensor's mesh."""

_INTEGER_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_replicas_match(runtime: Runtime, model: ParallelModel, optimizer: StatefulOptimizer, step: int) -> None:
    """Compare parameters and optimizer state of all replicas after step `step`. Collective: all ranks must call it.

    Raises TrainingError if any bit differs; the message names rank, node and tensor.
    """
    to_dtensor = model.shard_layout.wrap_as_dtensor
    tensors = {f"model/{name}": to_dtensor(name, parameter.detach()) for name, parameter in model.parameters.items()}
    tensors |= {
        f"optimizer/{name}": to_dtensor(name.partition("/")[2], tensor) for name, tensor in optimizer.collect_state_tensors().items()
    }
    shard_keys = [(name, model.mesh.tensor_rank, _get_shard_coordinates(tensor)) for name, tensor in tensors.items()]
    checksums_by_shard = dict(zip(shard_keys, compute_checksums(list(tensors.values())), strict=True))
    nodes, checksums_by_rank = zip(*collectives.all_gather_values((runtime.node, checksums_by_shard)), strict=True)
    for rank, (reference_rank, names) in find_differing_ranks(checksums_by_rank).items():
        others_text = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise TrainingError(
            f"rank {rank} on {nodes[rank]} has different values than rank {reference_rank} on {nodes[reference_rank]}, in "
            f"{names[0]}{others_text}",
            place=f"step {step}",
            hint=f"a GPU or memory of {nodes[rank]} may be failing: remove it from runner.hosts and resume from a checkpoint",
        )


def compute_checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum for each tensor: the sum of its elements' bits, read as integers, modulo 2^64.

    The checksum changes if any single bit flips, and does not depend on the order of summation.
    """
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    device = max((tensor.device for tensor in local), key=lambda device: device.type != "cpu", default=torch.device("cpu"))
    sums = [tensor.contiguous().view(_INTEGER_DTYPES[tensor.element_size()]).sum(dtype=torch.int64).to(device) for tensor in local]
    return [int(value) for value in torch.stack(sums).tolist()] if sums else []


def find_differing_ranks(checksums_by_rank: Sequence[Mapping[ShardKey, int]]) -> dict[int, tuple[int, list[str]]]:
    """Return the ranks whose shards differ from the majority of the ranks that hold the same shard.

    For each differing rank, return the reference rank (the lowest rank of the majority) and the names of the differing tensors. If no
    checksum is more frequent than the others, the lowest rank is the reference. `checksums_by_rank`: checksums of the shards of each rank.
    """
    values_by_shard: dict[ShardKey, dict[int, int]] = {}
    for rank, sums in enumerate(checksums_by_rank):
        for shard_key, value in sums.items():
            values_by_shard.setdefault(shard_key, {})[rank] = value
    differing: dict[int, tuple[int, list[str]]] = {}
    for shard_key, values in values_by_shard.items():
        majority_value = Counter(values.values()).most_common(1)[0][0]
        reference_rank = next(rank for rank, value in values.items() if value == majority_value)
        for rank, value in values.items():
            if value != majority_value:
                differing.setdefault(rank, (reference_rank, []))[1].append(shard_key[0])
    return differing


def _get_shard_coordinates(tensor: Tensor) -> tuple[int, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    coordinates = zip(tensor.device_mesh.get_coordinate() or (), tensor.placements, strict=True)
    return tuple(coordinate for coordinate, placement in coordinates if isinstance(placement, Shard))
