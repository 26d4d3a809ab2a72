"""Who has which GPUs, or other generic resources, on which node: what the engine answers → values.

What a service reserves counts from the moment that it exists, and until its container has ended for good: one that waits
for a GPU will get it, and one that is being started again has only let go of it for a moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from swarmtrain.launchers.swarm.observe import FINAL
from swarmtrain.launchers.swarm.resources import Raw, amount, given, reserved
from swarmtrain.wire import LABEL_STACK

Wants = Mapping[str, int]
"""How many of a kind a run is to have, by the constraint that pins its node: node.hostname==gpu-1."""


@dataclass(frozen=True)
class Supply:
    """The resources of one kind on one node: how many it declares, and how many each other stack has claimed ("" is no stack)."""

    host: str
    declared: int
    claimed: Mapping[str, int]

    @property
    def free(self) -> int:
        return max(0, self.declared - sum(self.claimed.values()))


def supplies(nodes: Iterable[Raw], services: Iterable[Raw], tasks: Iterable[Raw], kind: str, *, but: str = "") -> dict[str, Supply]:
    """Return what there is of `kind`, by node id; the claims of the stack `but` are left out."""
    nodes, services, tasks = list(nodes), list(services), list(tasks)
    claims: dict[tuple[str, str, str], int] = {}
    for task in tasks:
        if task.get("NodeID") and task["Status"]["State"] not in FINAL and (count := amount(given(task), kind)):
            key = (task["NodeID"], _stack_of_task(task), task.get("ServiceID", ""))
            claims[key] = claims.get(key, 0) + count
    for service, node, count in _pinned(nodes, services, tasks, kind):
        key = (node["ID"], _stack(service["Spec"]), service["ID"])
        claims[key] = max(claims.get(key, 0), count)
    return {node["ID"]: _supply(node, claims, kind, but) for node in nodes}


def node_of(constraint: str, nodes: Iterable[Raw]) -> Raw | None:
    """Return the node to which a constraint pins, None for one that pins to none."""
    key, _, value = (part.strip() for part in constraint.partition("=="))
    pinned = {"node.id": lambda node: node["ID"] == value, "node.hostname": lambda node: node["Description"].get("Hostname") == value}
    return next((node for node in nodes if key in pinned and pinned[key](node)), None)


def _supply(node: Raw, claims: Mapping[tuple[str, str, str], int], kind: str, but: str) -> Supply:
    claimed: dict[str, int] = {}
    for (where, stack, _), count in claims.items():
        if where == node["ID"] and (stack != but or not but):
            claimed[stack] = claimed.get(stack, 0) + count
    declared = (node["Description"].get("Resources") or {}).get("GenericResources") or []
    return Supply(node["Description"].get("Hostname", node["ID"]), amount(declared, kind), claimed)


def _pinned(nodes: list[Raw], services: list[Raw], tasks: list[Raw], kind: str) -> Iterator[tuple[Raw, Raw, int]]:
    """Yield the services that have or will have some of `kind` on a certain node, with that node and how many."""
    ended = _ended(tasks)
    for service in services:
        template = service["Spec"].get("TaskTemplate") or {}
        count = amount(reserved(template), kind) * int(service["Spec"]["Mode"].get("Replicated", {}).get("Replicas", 0))
        constraints = (template.get("Placement") or {}).get("Constraints") or []
        node = next(filter(None, (node_of(constraint, nodes) for constraint in constraints)), None)
        if count and node is not None and service["ID"] not in ended:
            yield service, node, count


def _ended(tasks: list[Raw]) -> set[str]:
    """Return the services whose newest task is done, and is not to be started again."""
    newest: dict[str, Raw] = {}
    for task in sorted(tasks, key=lambda task: str(task["CreatedAt"])):
        newest[task.get("ServiceID", "")] = task
    return {service for service, task in newest.items() if task["Status"]["State"] == "complete" and task["DesiredState"] == "shutdown"}


def _stack(spec: Raw) -> str:
    return str((spec.get("Labels") or {}).get(LABEL_STACK, ""))


def _stack_of_task(task: Raw) -> str:
    return _stack(task["Spec"].get("ContainerSpec") or {})
