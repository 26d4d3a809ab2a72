"""Name the runs that hold the GPUs for which a node waits: Swarm reports only that resources are insufficient.

A run that swarmtrain deploys waits before it creates services; this module serves runs that `docker stack deploy` has started.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.launchers.swarm.generic_resources import count_by_kind, get_reserved_resources
from swarmtrain.launchers.swarm.resource_accounting import ResourceSupply, compute_supplies

_INSUFFICIENT_RESOURCES = "insufficient resources"


def add_resource_holders(engine: DockerEngine, run: str, services: list[Service], states: list[TaskState]) -> list[TaskState]:
    """Return `states`, with the holders of the resources added to the reason of each node that waits for resources. Raises EngineError."""
    kinds = {kind for service in services for kind in count_by_kind(get_reserved_resources(service.spec["TaskTemplate"]))}
    if not kinds or not any(_INSUFFICIENT_RESOURCES in state.reason for state in states):
        return states
    nodes, all_services, tasks = (engine.list_objects(path) for path in ("/nodes", "/services", "/tasks"))
    supplies_by_kind = {
        kind: list(compute_supplies(nodes, all_services, tasks, kind, excluded_stack=run).values()) for kind in sorted(kinds)
    }
    return [add_holders_to_reason(state, supplies_by_kind) for state in states]


def add_holders_to_reason(state: TaskState, supplies_by_kind: Mapping[str, Sequence[ResourceSupply]]) -> TaskState:
    """Return `state`. If its node waits for resources, the reason also names the stacks that hold them, taken from `supplies_by_kind`."""
    if _INSUFFICIENT_RESOURCES not in state.reason:
        return state
    host_supplies = [
        (kind, supply) for kind, kind_supplies in supplies_by_kind.items() for supply in kind_supplies if supply.host == state.host
    ]
    holders = [
        f"{stack or 'another'} has {count} of {host_supply.declared} {kind}"
        for kind, host_supply in host_supplies
        for stack, count in host_supply.claimed.items()
    ]
    return replace(state, reason="; ".join([state.reason, *holders]))
