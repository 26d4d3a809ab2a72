"""The device mesh of all ranks, with dimensions for pipeline, tensor and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from swarmtrain.errors import WorldError
from swarmtrain.trainer.runtime import Runtime


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid with dimensions pipe x tensor x replica x shard.

    Consecutive rank numbers vary along the tensor dimension first, then along shard, replica and pipe. The dimensions replica and shard
    together are the data dimension, over whose ranks gradients are summed. Without context parallelism, each rank of the data dimension
    processes its own micro batches. With context parallelism, each group of consecutive ranks in the data dimension shares its micro
    batches, and each rank of the group processes a part of every sequence.
    """

    device_mesh: DeviceMesh
    context_mesh: DeviceMesh | None
    """Mesh of the ranks that share this rank's sequences; None without context parallelism."""
    state_mesh: DeviceMesh
    """The same mesh as `device_mesh`, for the device type on which parameters and optimizer state are stored: CPU with offloading."""
    pipe_rank: int
    pipe_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    micro_batches_per_replica: tuple[int, ...]
    """Number of micro batches that each replica processes in a step."""

    @property
    def pipe_group(self) -> dist.ProcessGroup:
        """Process group of this rank's pipeline: the ranks that hold its stages, in order."""
        return self.device_mesh.get_group("pipe")

    @property
    def is_loss_rank(self) -> bool:
        """True on the ranks whose loss is counted: the first tensor-parallel rank of the last pipeline stage, in each replica."""
        return self.pipe_rank == self.pipe_size - 1 and self.tensor_rank == 0

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that hold the same layers and tensor-parallel shards, and process different tokens."""
        return self.device_mesh.get_group("data")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Process group of the ranks that hold the same shards of the same parameters as this rank."""
        return self.device_mesh.get_group("replica")

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Process group of the tensor-parallel ranks that share this rank's layers."""
        return self.device_mesh.get_group("tensor")

    @property
    def ranks_by_shard(self) -> list[list[int]]:
        """For each shard of the model, the ranks that hold it: outer list by shard, inner list by replica."""
        pipe_tensor_shard_replica = 0, 1, 3, 2
        ranks: list[list[int]] = self.device_mesh.mesh.permute(pipe_tensor_shard_replica).flatten(0, 2).tolist()
        return ranks

    @property
    def process_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All process groups that training uses."""
        meshes = {id(mesh): mesh for mesh in (self.device_mesh, self.state_mesh, self.context_mesh) if mesh}.values()
        return (
            dist.distributed_c10d._get_default_group(),
            self.data_parallel_group,
            *(group for mesh in meshes for group in mesh.get_all_groups()),
        )


def build_mesh(runtime: Runtime) -> Mesh:
    """Return the mesh of all ranks. Raises WorldError if the number of ranks does not match the topology."""
    topology = runtime.config.topology
    try:
        micro_batches_per_replica = topology.assign_micro_batches(runtime.world_size)
    except ValueError as error:
        raise WorldError(str(error), place="config topology", hint="change the number of ranks to match the topology") from None
    context_size = topology.context_parallel_size
    shard_size = topology.compute_shard_group_size(len(micro_batches_per_replica), zero=runtime.config.optimizer.zero)
    # The tensor dimension comes before shard, because tensor-parallel shards are sharded again: DTensor applies dimensions in mesh order.
    ranks = (
        torch.arange(runtime.world_size)
        .view(
            topology.pipeline_parallel_size,
            len(micro_batches_per_replica) * context_size // shard_size,
            shard_size,
            topology.tensor_parallel_size,
        )
        .permute(0, 3, 1, 2)
        .clone(memory_format=torch.contiguous_format)  # torch 2.11 refuses slices of a mesh whose strides are not in descending order
    )
    names = "pipe", "tensor", "replica", "shard"
    device_mesh = DeviceMesh(runtime.device.type, ranks, mesh_dim_names=names)
    is_offloaded = topology.cpu_offload and runtime.device.type != "cpu"
    state_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names) if is_offloaded else device_mesh
    data_mesh = device_mesh["replica", "shard"]._flatten("data")
    pipe_rank, tensor_rank = (device_mesh.get_local_rank(name) for name in ("pipe", "tensor"))
    context_mesh = (
        DeviceMesh(runtime.device.type, ranks.reshape(-1, context_size), mesh_dim_names=("others", "context"))["context"]
        if context_size > 1
        else None
    )
    return Mesh(
        device_mesh,
        context_mesh,
        state_mesh,
        pipe_rank=pipe_rank,
        pipe_size=topology.pipeline_parallel_size,
        data_rank=data_mesh.get_local_rank() // context_size,
        data_size=len(micro_batches_per_replica),
        tensor_rank=tensor_rank,
        tensor_size=topology.tensor_parallel_size,
        micro_batches_per_replica=micro_batches_per_replica,
    )
