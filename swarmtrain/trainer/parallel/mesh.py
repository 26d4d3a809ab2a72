"""The one DeviceMesh: who shares layers with whom (tensor), who holds the same parameters (data), and who has the layers after (pipe)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from swarmtrain.errors import WorldError
from swarmtrain.trainer.runtime import Runtime


@dataclass(frozen=True)
class Mesh:
    """Ranks as a box, pipe x data x tensor, tensor innermost so that neighbours share layers."""

    device_mesh: DeviceMesh
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
        """True on one rank of each replica: one of those that have the last layer."""
        return self.pipe_rank == self.pipe_size - 1 and self.tensor_rank == 0

    @property
    def data_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same parameters as this one."""
        return self.device_mesh.get_group("data")

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """Ranks that share this rank's layers."""
        return self.device_mesh.get_group("tensor")

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All process groups in use."""
        return dist.distributed_c10d._get_default_group(), self.pipe_group, self.data_group, self.tensor_group


def build(here: Runtime) -> Mesh:
    """Return the mesh of this world. Raises WorldError if the world's size does not fit the topology."""
    topology = here.config.topology
    try:
        shares = topology.deal(here.size)
    except ValueError as error:
        raise WorldError(str(error), place="config topology", hint="add or remove ranks until it is") from None
    names, shape = ("pipe", "data", "tensor"), (topology.pipeline, len(shares), topology.tensor)
    device_mesh = init_device_mesh(here.device.type, shape, mesh_dim_names=names)
    pipe, data, tensor = (device_mesh.get_local_rank(name) for name in names)
    return Mesh(device_mesh, pipe, shape[0], data, shape[1], tensor, shape[2], shares)
