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

    With DiLoCo and several learner groups (see TopologyConfig.assign_learners), there is a dimension of learner groups before replica. The
    other dimensions are then within a group: replicas of different groups are not data parallel.
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
    """Number of micro batches of a learner that each replica processes in a step; without DiLoCo there is one learner."""
    evaluation_micro_batches_per_replica: tuple[int, ...]
    """Number of micro batches of a global batch that each replica evaluates: the replicas of all groups share the validation data."""
    local_learners: range
    """Indices of the learners that this rank trains."""
    learner_group_rank: int
    """Index of this rank's learner group."""
    learner_group_count: int
    """Number of learner groups, over which the learners are divided; 1 without DiLoCo."""

    @property
    def replica_count(self) -> int:
        """Number of replicas in all learner groups together."""
        return self.data_size * self.learner_group_count

    @property
    def replica_rank(self) -> int:
        """Index of this rank's replica among the replicas of all learner groups."""
        return self.learner_group_rank * self.data_size + self.data_rank

    @property
    def learner_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks that hold the same shard of the model in each learner group, in order; None for a single group."""
        return self.device_mesh.get_group("learner") if self.learner_group_count > 1 else None

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
        """For each shard of the model, the ranks that hold it: outer list by shard, inner list by replica.

        The state of a learner is not replicated in other learner groups, so these hold other shards.
        """
        replica_dimension = self.device_mesh.mesh.dim() - 2
        ranks: list[list[int]] = self.device_mesh.mesh.movedim(replica_dimension, -1).flatten(0, -2).tolist()
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
        learner_groups, replicas = topology.assign_learners(runtime.world_size), topology.compute_data_parallel_size(runtime.world_size)
        micro_batches_per_replica = topology.divide_micro_batches(replicas // len(learner_groups), learners=1)
    except ValueError as error:
        raise WorldError(str(error), place="config topology", hint="change the number of ranks to match the topology") from None
    context_size = topology.context_parallel_size
    shard_size = topology.compute_shard_group_size(len(micro_batches_per_replica), zero=runtime.config.optimizer.zero)
    # The tensor dimension comes before shard, because tensor-parallel shards are sharded again: DTensor applies dimensions in mesh order.
    ranks = (
        torch.arange(runtime.world_size)
        .view(
            topology.pipeline_parallel_size,
            len(learner_groups),
            len(micro_batches_per_replica) * context_size // shard_size,
            shard_size,
            topology.tensor_parallel_size,
        )
        .permute(0, 4, 1, 2, 3)
        .clone(memory_format=torch.contiguous_format)  # torch 2.11 refuses slices of a mesh whose strides are not in descending order
    )
    names: tuple[str, ...] = "pipe", "tensor", "learner", "replica", "shard"
    if len(learner_groups) == 1:
        ranks, names = ranks.squeeze(2), ("pipe", "tensor", "replica", "shard")
    device_mesh = DeviceMesh(runtime.device.type, ranks, mesh_dim_names=names)
    is_offloaded = topology.cpu_offload and runtime.device.type != "cpu"
    state_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names) if is_offloaded else device_mesh
    data_mesh = device_mesh["replica", "shard"]._flatten("data")
    pipe_rank, tensor_rank = (device_mesh.get_local_rank(name) for name in ("pipe", "tensor"))
    learner_group_rank = device_mesh.get_local_rank("learner") if len(learner_groups) > 1 else 0
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
        evaluation_micro_batches_per_replica=topology.divide_micro_batches(replicas),
        local_learners=learner_groups[learner_group_rank],
        learner_group_rank=learner_group_rank,
        learner_group_count=len(learner_groups),
    )
