"""The one DeviceMesh: who has the layers after, who shares layers with whom, who keeps which part of the state, who holds the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from swarmtrain.errors import WorldError
from swarmtrain.trainer.runtime import Runtime


@dataclass(frozen=True)
class Mesh:
    """Ranks as a box, pipe x tensor x replica x shard. Ranks of neighbouring numbers share layers, then state.

    The last two together are the data dimension: its ranks add their gradients up. Each of them takes micro batches of its
    own, or, where sequences are divided (context parallel), neighbours share micro batches and take parts of each.
    """

    device_mesh: DeviceMesh
    context_mesh: DeviceMesh | None
    """Ranks that share this rank's sequences, if it shares them."""
    state_mesh: DeviceMesh
    """The same, of the devices where parameters and optimizer state are kept."""
    pipe_rank: int
    pipe_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    tensor_size: int
    shares: tuple[int, ...]
    """Micro batches that each replica takes in a step."""

    @property
    def pipe_group(self) -> dist.ProcessGroup:
        """Ranks that hold the stages of this rank's pipeline, in order."""
        return self.device_mesh.get_group("pipe")

    @property
    def has_loss(self) -> bool:
        """True on one rank of each replica, or of each part of its sequences: one of those that have the last layer."""
        return self.pipe_rank == self.pipe_size - 1 and self.tensor_rank == 0

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that compute the same as this one, each with tokens of its own."""
        return self.device_mesh.get_group("data")

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part of the same parameters as this one."""
        return self.device_mesh.get_group("replica")

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Ranks that share this rank's layers."""
        return self.device_mesh.get_group("tensor")

    @property
    def holders(self) -> list[list[int]]:
        """The ranks that hold the same part of the same parameters, for each of the parts into which these are divided."""
        pipe_tensor_shard_replica = 0, 1, 3, 2
        found: list[list[int]] = self.device_mesh.mesh.permute(pipe_tensor_shard_replica).flatten(0, 2).tolist()
        return found

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All process groups in use."""
        meshes = {id(mesh): mesh for mesh in (self.device_mesh, self.state_mesh, self.context_mesh) if mesh}.values()
        return dist.distributed_c10d._get_default_group(), self.data_group, *(group for mesh in meshes for group in mesh.get_all_groups())


def build(here: Runtime) -> Mesh:
    """Return the mesh of this world. Raises WorldError if the world's size does not fit the topology."""
    topology = here.config.topology
    try:
        shares = topology.deal(here.size)
    except ValueError as error:
        raise WorldError(str(error), place="config topology", hint="add or remove ranks until it is") from None
    context = topology.context_parallel_size
    shard = topology.shard_size(len(shares), zero=here.config.optimizer.zero)
    # Tensor comes first, since what it has divided is divided again over shard: DTensor reads dimensions in that order.
    ranks = torch.arange(here.size).view(topology.pipeline, len(shares) * context // shard, shard, topology.tensor).permute(0, 3, 1, 2)
    names = "pipe", "tensor", "replica", "shard"
    device_mesh = DeviceMesh(here.device.type, ranks, mesh_dim_names=names)
    elsewhere = topology.cpu_offload and here.device.type != "cpu"
    state_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names) if elsewhere else device_mesh
    data = device_mesh["replica", "shard"]._flatten("data")
    pipe, tensor = (device_mesh.get_local_rank(name) for name in ("pipe", "tensor"))
    sharing = (
        DeviceMesh(here.device.type, ranks.reshape(-1, context), mesh_dim_names=("others", "context"))["context"] if context > 1 else None
    )
    return Mesh(
        device_mesh,
        sharing,
        state_mesh,
        pipe_rank=pipe,
        pipe_size=topology.pipeline,
        data_rank=data.get_local_rank() // context,
        data_size=len(shares),
        tensor_rank=tensor,
        tensor_size=topology.tensor,
        shares=shares,
    )
