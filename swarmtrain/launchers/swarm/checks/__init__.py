"""The doctor's checks on a swarm that need no probe: on the swarm itself (cluster_checks), and on the plan's machines (capacity_checks)."""

from __future__ import annotations

from swarmtrain.launchers.base import ClusterReport
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.checks import capacity_checks, cluster_checks
from swarmtrain.planning.plan import Plan


def inspect_cluster(engine: DockerEngine, plan: Plan | None) -> ClusterReport:
    """Run the checks on the swarm and, with a `plan`, on its machines. Raises EngineError if no manager responds."""
    snapshot = cluster_checks.take_snapshot(engine, plan)
    return ClusterReport(
        cluster_checks.CHECKS.run_checks(snapshot),
        node_ids={planned.name: node["ID"] for node, planned in snapshot.planned_nodes},
        machine_addresses={cluster_checks.get_host_name(node): cluster_checks.get_machine_address(node) for node in snapshot.nodes},
        subnets=snapshot.swarm_subnets,
        image=snapshot.image.reference if snapshot.image else "",
        lacks_free_gpus=capacity_checks.needs_reserved_gpus(snapshot),
    )
