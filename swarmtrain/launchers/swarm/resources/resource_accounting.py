"""Compute from the engine's responses how many GPUs and other generic resources each stack has claimed on each node.

A service's reservation counts from its creation until its container has finally ended: a pending service will be assigned its GPU,
and a restarting service releases its GPU only briefly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.cluster_state import FINAL_STATES, Service
from swarmtrain.launchers.swarm.machines.generic_resources import (
    ApiObject,
    count_resources,
    count_resources_by_kind,
    get_assigned_resources,
    get_reserved_resources,
)
from swarmtrain.protocol import LABEL_STACK

_INSUFFICIENT_RESOURCES = "insufficient resources"

RequestedAmounts = Mapping[str, int]
"""Requested amount of a resource, by the placement constraint that selects the node, for example node.hostname==gpu-1."""


@dataclass(frozen=True)
class ResourceSupply:
    """Supply of one kind of resource on one node: the amount that it declares, and the amounts that other stacks have claimed.

    In `claimed`, the key "" stands for tasks without a stack.
    """

    host: str
    declared: int
    claimed: Mapping[str, int]

    @property
    def free_count(self) -> int:
        return max(0, self.declared - sum(self.claimed.values()))


def compute_resource_supplies(
    nodes: Iterable[ApiObject], services: Iterable[ApiObject], tasks: Iterable[ApiObject], kind: str, *, excluded_stack: str = ""
) -> dict[str, ResourceSupply]:
    """Return the supply of `kind`, by node id, without the claims of the stack `excluded_stack`."""
    nodes, services, tasks = list(nodes), list(services), list(tasks)
    claims: dict[tuple[str, str, str], int] = {}
    for task in tasks:
        if (
            task.get("NodeID")
            and task["Status"]["State"] not in FINAL_STATES
            and (count := count_resources(get_assigned_resources(task), kind))
        ):
            key = (task["NodeID"], _get_task_stack_label(task), task.get("ServiceID", ""))
            claims[key] = claims.get(key, 0) + count
    for service, node, count in _list_pinned_services(nodes, services, tasks, kind):
        key = (node["ID"], _get_stack_label(service["Spec"]), service["ID"])
        claims[key] = max(claims.get(key, 0), count)
    return {node["ID"]: _build_resource_supply(node, claims, kind, excluded_stack) for node in nodes}


def find_pinned_node(constraint: str, nodes: Iterable[ApiObject]) -> ApiObject | None:
    """Return the swarm node to which `constraint` pins a service; None if it does not name a node."""
    key, _, value = (part.strip() for part in constraint.partition("=="))
    pinned = {"node.id": lambda node: node["ID"] == value, "node.hostname": lambda node: node["Description"].get("Hostname") == value}
    return next((node for node in nodes if key in pinned and pinned[key](node)), None)


def add_resource_holders_to_states(engine: DockerEngine, run: str, services: list[Service], states: list[TaskState]) -> list[TaskState]:
    """Return `states`, with the holders of the resources added to the reason of each node that waits for resources. Raises EngineError."""
    kinds = {kind for service in services for kind in count_resources_by_kind(get_reserved_resources(service.spec["TaskTemplate"]))}
    if not kinds or not any(_INSUFFICIENT_RESOURCES in state.reason for state in states):
        return states
    nodes, all_services, tasks = (engine.list_objects(path) for path in ("/nodes", "/services", "/tasks"))
    supplies_by_kind = {
        kind: list(compute_resource_supplies(nodes, all_services, tasks, kind, excluded_stack=run).values()) for kind in sorted(kinds)
    }
    return [append_resource_holders_to_pending_reason(state, supplies_by_kind) for state in states]


def append_resource_holders_to_pending_reason(state: TaskState, supplies_by_kind: Mapping[str, Sequence[ResourceSupply]]) -> TaskState:
    """Return `state`. If its node waits for resources, the reason also names the stacks that hold them, taken from `supplies_by_kind`."""
    if _INSUFFICIENT_RESOURCES not in state.reason:
        return state
    host_supplies = [
        (kind, supply) for kind, kind_supplies in supplies_by_kind.items() for supply in kind_supplies if supply.host == state.host
    ]
    holders = [
        f"{stack or 'a service outside any stack'} has {count} of {host_supply.declared} {kind}"
        for kind, host_supply in host_supplies
        for stack, count in host_supply.claimed.items()
    ]
    return replace(state, reason="; ".join([state.reason, *holders]))


def _build_resource_supply(node: ApiObject, claims: Mapping[tuple[str, str, str], int], kind: str, excluded_stack: str) -> ResourceSupply:
    claimed: dict[str, int] = {}
    for (node_id, stack, _), count in claims.items():
        if node_id == node["ID"] and (stack != excluded_stack or not excluded_stack):
            claimed[stack] = claimed.get(stack, 0) + count
    declared = (node["Description"].get("Resources") or {}).get("GenericResources") or []
    return ResourceSupply(node["Description"].get("Hostname", node["ID"]), count_resources(declared, kind), claimed)


def _list_pinned_services(
    nodes: list[ApiObject], services: list[ApiObject], tasks: list[ApiObject], resource_kind: str
) -> Iterator[tuple[ApiObject, ApiObject, int]]:
    """Yield (service, node, amount) for each unfinished service that is pinned to a node and reserves `resource_kind`."""
    finished = _find_finished_services(tasks)
    for service in services:
        template = service["Spec"].get("TaskTemplate") or {}
        count = count_resources(get_reserved_resources(template), resource_kind) * int(
            service["Spec"]["Mode"].get("Replicated", {}).get("Replicas", 0)
        )
        constraints = (template.get("Placement") or {}).get("Constraints") or []
        node = next(filter(None, (find_pinned_node(constraint, nodes) for constraint in constraints)), None)
        if count and node is not None and service["ID"] not in finished:
            yield service, node, count


def _find_finished_services(tasks: list[ApiObject]) -> set[str]:
    """Return the ids of the services whose newest task is complete, and which will not be restarted."""
    newest: dict[str, ApiObject] = {}
    for task in sorted(tasks, key=lambda task: str(task["CreatedAt"])):
        newest[task.get("ServiceID", "")] = task
    return {service for service, task in newest.items() if task["Status"]["State"] == "complete" and task["DesiredState"] == "shutdown"}


def _get_stack_label(spec: ApiObject) -> str:
    return str((spec.get("Labels") or {}).get(LABEL_STACK, ""))


def _get_task_stack_label(task: ApiObject) -> str:
    return _get_stack_label(task["Spec"].get("ContainerSpec") or {})
