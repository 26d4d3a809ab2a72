"""GPUs that Swarm assigned to this container, of those that its engine advertises as generic resources.

Swarm passes their ids in environment variables named DOCKER_RESOURCE_ plus the resource kind, but does not restrict the visible devices.
NVIDIA's container toolkit does so only if its `swarm-resource` setting is set, and in some versions not even then. If the container sees
more GPUs than were assigned, CUDA_VISIBLE_DEVICES restricts the ranks to the assigned ones.
"""

from __future__ import annotations

from collections.abc import Mapping

_RESOURCE_PREFIX = "DOCKER_RESOURCE_"


def read_assigned_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the ids of the GPUs that Swarm assigned to this container.

    Empty if Swarm assigned a number of GPUs without ids, or if none were requested.
    """
    gpu_ids = [gpu for name, value in sorted(environ.items()) if name.startswith(_RESOURCE_PREFIX) for gpu in value.split(",")]
    return tuple(gpu for gpu in gpu_ids if gpu and not gpu.isdigit())


def build_gpu_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that restrict the ranks to the GPUs that Swarm assigned.

    Empty if Swarm assigned none, or if `environ` already sets CUDA_VISIBLE_DEVICES. Local rank 0 gets the first GPU.
    """
    ids = read_assigned_gpus(environ)
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids)} if ids and "CUDA_VISIBLE_DEVICES" not in environ else {}
