"""Compute from the engine's responses how many GPUs and other generic resources each stack has reserved on each node.

A service's reservation counts from its creation until its container has finally ended: a pending service will be assigned its GPU,
and a restarting service releases its GPU only briefly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from swarmtrain.protocol import LABEL_OWNER, LABEL_STACK

_INSUFFICIENT_RESOURCES = "insufficient resources"

RequestedAmounts = Mapping[str, int]
"""Requested amount of a resource, by the placement constraint that selects the node, for example node.hostname==gpu-1."""


@dataclass(frozen=True)
class ResourceSupply:
    """Supply of one kind of resource on one node: the amount that it declares, and the amounts that other stacks have reserved.

    In `reserved`, the key "" stands for tasks without a stack.
    """

    host: str
    declared: int
    reserved: Mapping[str, int]
    owners: Mapping[str, str] = field(default_factory=dict)
    """Owners of the stacks that are runs."""

    @property
    def free_count(self) -> int:
        return max(0, self.declared - sum(self.reserved.values()))

    def describe_reservations(self) -> list[str]:
        """Return a phrase for each stack that has reserved resources: 2 reserved by first of anna."""
        return [
            f"{count} reserved by {stack or 'a service outside any stack'}{f' of {owner}' if (owner := self.owners.get(stack)) else ''}"
            for stack, count in sorted(self.reserved.items())
        ]


def compute_resource_supplies(
    nodes: Iterable[ApiObject], services: Iterable[ApiObject], tasks: Iterable[ApiObject], kind: str, *, excluded_stack: str = ""
) -> dict[str, ResourceSupply]:
    """Return the supply of `kind`, by node id, without the reservations of the stack `excluded_stack`."""
    nodes, services, tasks = list(nodes), list(services), list(tasks)
    reservations: dict[tuple[str, str, str], int] = {}
    for task in tasks:
        if (
            task.get("NodeID")
            and task["Status"]["State"] not in FINAL_STATES
            and (count := count_resources(get_assigned_resources(task), kind))
        ):
            key = (task["NodeID"], _get_task_stack_label(task), task.get("ServiceID", ""))
            reservations[key] = reservations.get(key, 0) + count
    for service, node, count in _list_pinned_services(nodes, services, tasks, kind):
        key = (node["ID"], _get_stack_label(service["Spec"]), service["ID"])
        reservations[key] = max(reservations.get(key, 0), count)
    labels = [service["Spec"].get("Labels") or {} for service in services]
    owners = {item.get(LABEL_STACK, ""): item[LABEL_OWNER] for item in labels if item.get(LABEL_OWNER)}
    return {node["ID"]: _build_resource_supply(node, reservations, owners, kind, excluded_stack) for node in nodes}


def find_pinned_node(constraint: str, nodes: Iterable[ApiObject]) -> ApiObject | None:
    """Return the swarm node to which `constraint` pins a service; None if it does not name a node."""
    key, _, value = (part.strip() for part in constraint.partition("=="))
    pinned = {"node.id": lambda node: node["ID"] == value, "node.hostname": lambda node: node["Description"].get("Hostname") == value}
    return next((node for node in nodes if key in pinned and pinned[key](node)), None)


def add_reservations_to_states(engine: DockerEngine, run: str, services: list[Service], states: list[TaskState]) -> list[TaskState]:
    """Return `states`, with who has reserved the resources added to the reason of each node that waits for some. Raises EngineError."""
    kinds = {kind for service in services for kind in count_resources_by_kind(get_reserved_resources(service.spec["TaskTemplate"]))}
    if not kinds or not any(_INSUFFICIENT_RESOURCES in state.reason for state in states):
        return states
    nodes, all_services, tasks = (engine.list_objects(path) for path in ("/nodes", "/services", "/tasks"))
    supplies_by_kind = {
        kind: list(compute_resource_supplies(nodes, all_services, tasks, kind, excluded_stack=run).values()) for kind in sorted(kinds)
    }
    return [add_reservations_to_pending_reason(state, supplies_by_kind) for state in states]


def add_reservations_to_pending_reason(state: TaskState, supplies_by_kind: Mapping[str, Sequence[ResourceSupply]]) -> TaskState:
    """Return `state`. If its node waits for resources, the reason also names the stacks that have reserved them."""
    if _INSUFFICIENT_RESOURCES not in state.reason:
        return state
    reservations = [
        f"{kind}: {supply.declared} in total, {', '.join(supply.describe_reservations())}"
        for kind, kind_supplies in supplies_by_kind.items()
        for supply in kind_supplies
        if supply.host == state.host and supply.reserved
    ]
    return replace(state, reason="; ".join([state.reason, *reservations]))


def _build_resource_supply(
    node: ApiObject, reservations: Mapping[tuple[str, str, str], int], owners: Mapping[str, str], kind: str, excluded_stack: str
) -> ResourceSupply:
    reserved: dict[str, int] = {}
    for (node_id, stack, _), count in reservations.items():
        if node_id == node["ID"] and (stack != excluded_stack or not excluded_stack):
            reserved[stack] = reserved.get(stack, 0) + count
    declared = (node["Description"].get("Resources") or {}).get("GenericResources") or []
    own = {stack: owners[stack] for stack in reserved if stack in owners}
    return ResourceSupply(node["Description"].get("Hostname", node["ID"]), count_resources(declared, kind), reserved, own)


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
