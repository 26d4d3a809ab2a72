"""The ids of the GPUs of each machine of a swarm, in the order of their numbers."""

from __future__ import annotations

from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.machines.generic_resources import list_resource_ids
from swarmtrain.launchers.swarm.machines.probed_gpus import read_probed_gpus


def read_gpu_ids(engine: DockerEngine) -> dict[str, tuple[str, ...]]:
    """Return by node id the ids of the GPUs that the machine declares, or else those of its last probe. Raises EngineError.

    Empty for a machine that declares only a number of GPUs, or none, and was not probed.
    """
    probed = read_probed_gpus(engine)
    declared = {
        node["ID"]: (node["Description"].get("Resources") or {}).get("GenericResources") or [] for node in engine.list_objects("/nodes")
    }
    return {node_id: list_resource_ids(resources) or probed.get(node_id, ()) for node_id, resources in declared.items()}
