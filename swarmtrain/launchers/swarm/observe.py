"""What is there: a stack's services, networks, configs, secrets and tasks, found by their label, and the swarm's nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import EngineError, RunNotFound
from swarmtrain.launchers.base import TaskState
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm.resources import counted, described, given
from swarmtrain.plan import Inventory, Machine
from swarmtrain.wire import LABEL_ROLE, LABEL_RUN, LABEL_STACK, PREFIX, RENDEZVOUS, ROLE_NODE, ROLE_PROBE

# On the lock of a run, on its place among those that wait for GPUs, and on both.
LABEL_LOCK = "swarmtrain.lock.run"
LABEL_QUEUE = "swarmtrain.queue.run"
LABEL_WHO = "swarmtrain.lock.who"
LABEL_DOES = "swarmtrain.lock.does"
_NODE = f"{PREFIX}NODE="
# The config of configs: the first thing that is made of a run and the last that is removed, so that none is forgotten.
_MARK = re.compile(r"config-[0-9a-f]{10}")
# States after which a task never runs again; the others lead to running, or are it.
FINAL = frozenset({"complete", "shutdown", "failed", "rejected", "remove", "orphaned"})


@dataclass(frozen=True)
class Service:
    """A service as the swarm has it; `version` guards an update against another that came first."""

    id: str
    version: int
    spec: dict[str, Any]
    changed: bool = False
    """It is not as it was made: somebody has updated it since."""

    @property
    def name(self) -> str:
        return str(self.spec["Name"])

    @property
    def source(self) -> str:
        """Where its log is asked for."""
        return f"/services/{self.id}"

    @property
    def replicas(self) -> int:
        return int(self.spec["Mode"].get("Replicated", {}).get("Replicas", 0))

    @property
    def is_node(self) -> bool:
        return bool(self.spec.get("Labels", {}).get(LABEL_ROLE) == ROLE_NODE)

    @property
    def is_probe(self) -> bool:
        return bool(self.spec["TaskTemplate"].get("ContainerSpec", {}).get("Args") == [ROLE_PROBE])


@dataclass(frozen=True)
class Task:
    """One start of a service's container."""

    id: str
    service: str
    """The service's id."""
    node: str
    state: str
    desired: str
    reason: str
    exit_code: int | None
    created: str
    name: str = ""
    """Of the run's node, or rendezvous."""
    grace: float = 0.0
    """Seconds from the signal to stop to the kill."""
    gpus: tuple[str, ...] = ()
    """The GPUs or other resources that it was given, by id, or how many of which kind."""

    @property
    def over(self) -> bool:
        """Nothing of it runs, and nothing will."""
        return self.state in FINAL


@dataclass(frozen=True)
class Observed:
    """What the swarm has under one stack's label, by full name. `network_ids` names all networks of the swarm."""

    stack: str
    services: Mapping[str, Service]
    networks: Mapping[str, dict[str, Any]]
    configs: Mapping[str, str]
    secrets: Mapping[str, str]
    network_ids: Mapping[str, str]
    local: frozenset[str] = frozenset()
    """Networks that only this engine has."""

    @property
    def empty(self) -> bool:
        return not (self.services or self.networks or self.configs or self.secrets)

    def short(self, service: Service) -> str:
        """Return the service's name in the document: node0."""
        return service.name.removeprefix(f"{self.stack}_")


def observe(engine: Engine, stack: str) -> Observed:
    """Return what there is of `stack`. Raises EngineError."""
    label = f"{LABEL_STACK}={stack}"
    networks = engine.listing("/networks")
    found = services(engine, stack)
    return Observed(
        stack=stack,
        services={service.name: service for service in found},
        networks={item["Name"]: item for item in networks if (item.get("Labels") or {}).get(LABEL_STACK) == stack},
        configs={item["Spec"]["Name"]: item["ID"] for item in engine.listing("/configs", label=label)},
        secrets={item["Spec"]["Name"]: item["ID"] for item in engine.listing("/secrets", label=label)},
        network_ids={item["Id"]: item["Name"] for item in networks} | _unlisted(engine, found, networks),
        local=frozenset(item["Name"] for item in networks if item.get("Scope") == "local"),
    )


def _unlisted(engine: Engine, found: list[Service], networks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the names, by id, of networks that services are in and no listing shows: the host's, of which the swarm has its own."""
    targets = {network["Target"] for service in found for network in service.spec["TaskTemplate"].get("Networks") or []}
    names: dict[str, str] = {}
    for target in targets - {name for item in networks for name in (item["Id"], item["Name"])}:
        with contextlib.suppress(EngineError):  # it is gone
            names[target] = network_of(engine, target)
    return names


def network_of(engine: Engine, target: str) -> str:
    """Return the name of the network that a service's spec names, by id or by name. Raises EngineError."""
    return str(engine.get(f"/networks/{target}")["Name"])


def services(engine: Engine, stack: str) -> list[Service]:
    """Return the services of `stack`, nodes first, by number. Raises EngineError."""
    found = [
        Service(item["ID"], item["Version"]["Index"], item["Spec"], "PreviousSpec" in item)
        for item in engine.listing("/services", label=f"{LABEL_STACK}={stack}")
    ]
    return sorted(found, key=lambda service: (not service.is_node, natural(service.name)))


def run_services(engine: Engine, run: str) -> list[Service]:
    """Return the services of `run`, nodes first. Raises RunNotFound if there is no such run, or it is no run of ours."""
    found = services(engine, run)
    if not any(LABEL_RUN in service.spec.get("Labels", {}) for service in found):
        raise not_found(engine, run)
    return found


def not_found(engine: Engine, run: str) -> RunNotFound:
    """Return the error for a run that is not there, which lists those that are."""
    if waiting := [item["Spec"]["Labels"] for item in engine.listing("/configs", label=f"{LABEL_QUEUE}={run}")]:
        message = f"it is not up yet: {waiting[0].get(LABEL_WHO, 'somebody')} {waiting[0].get(LABEL_DOES, 'waits')}"
        return RunNotFound(message, place=f"run {run}", hint=f"swarmtrain down {run} gives up its place in the queue")
    if run in leaving(engine):
        hint = f"swarmtrain down {run} returns when nothing of it is left"
        return RunNotFound("it is going down, or was left half made", place=f"run {run}", hint=hint)
    known = ", ".join(runs(engine)) or "none"
    message = f"there is no such run on the swarm at {engine.address}; there is: {known}"
    return RunNotFound(message, place=f"run {run}", hint="docker stack ls")


def runs(engine: Engine) -> list[str]:
    """Return the stacks whose services carry our label, sorted. Raises EngineError."""
    found = engine.listing("/services", label=LABEL_RUN)
    return sorted({item["Spec"]["Labels"].get(LABEL_STACK, "") for item in found} - {""})


def leaving(engine: Engine) -> list[str]:
    """Return the runs that have no services and of which something is still there or still stops, sorted. Raises EngineError."""
    configs = engine.listing("/configs")
    left = {_stack(item) for item in configs if _stack(item) and is_mark(_stack(item), item["Spec"]["Name"])}
    left |= {item["Spec"]["Labels"][LABEL_LOCK] for item in configs if LABEL_LOCK in (item["Spec"].get("Labels") or {})}
    stopping = [item for item in engine.listing("/tasks", label=LABEL_RUN) if item["DesiredState"] == "remove"]
    down = down_nodes(engine) if stopping else {}
    left |= {item["Spec"]["ContainerSpec"]["Labels"][LABEL_STACK] for item in stopping if item.get("NodeID", "") not in down}
    return sorted(left - {_stack(item) for item in engine.listing("/services")})


def is_mark(stack: str, config: str) -> bool:
    """Say whether this is the config by which a run is known when its services are gone."""
    return bool(_MARK.fullmatch(config.removeprefix(f"{stack}_")))


def _stack(item: dict[str, Any]) -> str:
    return str((item["Spec"].get("Labels") or {}).get(LABEL_STACK, ""))


def tasks(engine: Engine, stack: str) -> list[Task]:
    """Return all tasks of `stack` that the swarm still knows, oldest first; those of removed services too. Raises EngineError."""
    found = [_task(item) for item in engine.listing("/tasks", label=f"{LABEL_STACK}={stack}")]
    return sorted(found, key=lambda task: task.created)


def _task(item: dict[str, Any]) -> Task:
    status = item.get("Status", {})
    container = status.get("ContainerStatus") or {}
    spec = item["Spec"].get("ContainerSpec", {})
    return Task(
        id=item["ID"],
        service=item.get("ServiceID", ""),
        node=item.get("NodeID", ""),
        state=status.get("State", "new"),
        desired=item.get("DesiredState", ""),
        reason=status.get("Err", ""),
        exit_code=container.get("ExitCode") if status.get("State") in ("failed", "complete") else None,
        created=item["CreatedAt"],
        name=next((setting.removeprefix(_NODE) for setting in spec.get("Env") or [] if setting.startswith(_NODE)), RENDEZVOUS),
        grace=float(spec.get("StopGracePeriod", 10 * 10**9)) / 1e9,
        gpus=described(given(item)) if item.get("NodeID") and status.get("State") not in FINAL else (),
    )


def newest(found: list[Task], service: str) -> Task | None:
    """Return the newest task of the service with this id."""
    return next((task for task in reversed(found) if task.service == service), None)


def replaced(found: list[Task], service: str) -> frozenset[str]:
    """Return the ids of the service's tasks that a newer one has taken over from."""
    return frozenset([task.id for task in found if task.service == service][:-1])


def task_state(observed_name: str, found: list[Task], service: Service, hosts: Mapping[str, str]) -> TaskState:
    """Return how `service` stands, in Swarm's words; while a task waits to start, the reason is why the one before it ended."""
    task = newest(found, service.id)
    host = service.spec.get("Labels", {}).get("swarmtrain.host", "")
    if task is None or (service.replicas == 0 and task.over):
        return TaskState(observed_name, host, "stopped" if service.replicas == 0 else "new")
    reason = task.reason
    if not reason and not task.over and task.state != "running":
        before = [other for other in found if other.service == service.id and other.id != task.id and other.reason]
        reason = f"starts again after: {before[-1].reason}" if before else ""
    return TaskState(observed_name, hosts.get(task.node, host), task.state, reason, task.exit_code, task.gpus)


def stopping(found: list[Task], services: list[Service], hosts: Mapping[str, str]) -> list[TaskState]:
    """Return the nodes whose services are removed and whose containers still run."""
    there = {service.id for service in services}
    left = [task for task in found if task.service not in there and task.node and not task.over]
    return [TaskState(task.name, hosts.get(task.node, ""), "stopping", "its service is removed") for task in left]


def hosts(engine: Engine) -> dict[str, str]:
    """Return the host name of each node id. Raises EngineError."""
    return {node["ID"]: node["Description"]["Hostname"] for node in engine.listing("/nodes")}


def managers(engine: Engine) -> list[str]:
    """Return the host names of the swarm's managers, sorted. Raises EngineError."""
    return sorted((node["Description"]["Hostname"] for node in engine.listing("/nodes", role="manager")), key=natural)


def down_nodes(engine: Engine) -> dict[str, str]:
    """Return the host names, by id, of nodes that do not answer the managers. Raises EngineError."""
    return {node["ID"]: node["Description"]["Hostname"] for node in engine.listing("/nodes") if node["Status"]["State"] == "down"}


def inventory(engine: Engine) -> Inventory:
    """Return the swarm's nodes by name, node2 before node10. Raises EngineError."""
    machines = sorted((_machine(node) for node in engine.listing("/nodes")), key=lambda machine: (natural(machine.host), machine.id))
    count = f"{len(machines)} node{'' if len(machines) == 1 else 's'}"
    return Inventory(f"the swarm of {count} at {engine.endpoint}", tuple(machines))


def _machine(node: dict[str, Any]) -> Machine:
    description = node["Description"]
    return Machine(
        host=description["Hostname"],
        id=node["ID"],
        # Old engines show a leader's own address as 0.0.0.0; what counts for a manager is what it told the others.
        address=(node.get("ManagerStatus") or {}).get("Addr", "").rpartition(":")[0].strip("[]") or node["Status"].get("Addr", ""),
        manager=node["Spec"]["Role"] == "manager",
        unavailable=_unavailable(node),
        labels=node["Spec"].get("Labels") or {},
        resources=counted(description.get("Resources", {}).get("GenericResources") or []),
        engine=description.get("Engine", {}).get("EngineVersion", ""),
    )


def _unavailable(node: dict[str, Any]) -> str:
    if node["Status"]["State"] != "ready":
        return str(node["Status"]["State"])
    return {"drain": "drained", "pause": "paused"}.get(node["Spec"]["Availability"], "")


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a key that sorts the numbers in a name as numbers."""
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part)


def board(found: list[Service], stack: str) -> Service | None:
    """Return the rendezvous service."""
    return next((service for service in found if service.name == f"{stack}_{RENDEZVOUS}"), None)
