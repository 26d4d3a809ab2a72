"""Current state of the swarm: a stack's services, networks, configs, secrets and tasks, found by the stack label, and the swarm's nodes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from swarmtrain.errors import EngineError, RunNotFound
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.machines.generic_resources import count_resources_by_kind, describe_resources, get_assigned_resources
from swarmtrain.launchers.swarm.machines.machine_records import read_gpu_counts
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.protocol import ENV_PREFIX, LABEL_ROLE, LABEL_RUN, LABEL_STACK, RENDEZVOUS_SERVICE, ROLE_NODE, ROLE_PROBE
from swarmtrain.protocol.run_identity import RunIdentity, is_valid_run_name

# Labels on the lock of a run.
LABEL_LOCK = "swarmtrain.lock.run"
LABEL_LOCK_OWNER = "swarmtrain.lock.owner"
LABEL_LOCK_ACTION = "swarmtrain.lock.action"
_NODE_PREFIX = f"{ENV_PREFIX}NODE="
# Label of the config object with the run's config. It is created first and removed last, so that every run can be found.
_MARKER_CONFIG_PATTERN = re.compile(r"config-[0-9a-f]{10}")
# States after which a task never runs again. The other task states are `running` and the states before it.
FINAL_STATES = frozenset({"complete", "shutdown", "failed", "rejected", "remove", "orphaned"})
UNKNOWN_STATE = "unknown"
"""State of a node that a new leader of the managers has not heard of. It becomes ready or down within half a minute."""
_AVAILABILITY_WORDS = {"drain": "drained", "pause": "paused"}
NEW_LEADER_HINT = "the managers have a new leader, which has not heard of this node yet; try again in 30 s"


@dataclass(frozen=True)
class Service:
    """A Swarm service. An update must send `version`, by which the manager detects a concurrent update."""

    id: str
    version: int
    spec: dict[str, Any]
    is_modified: bool = False
    """Whether the service has been updated since its creation."""
    created: str = ""
    """Time of the service's creation, in Docker's format."""

    @property
    def name(self) -> str:
        return str(self.spec["Name"])

    @property
    def labels(self) -> dict[str, str]:
        return self.spec.get("Labels") or {}

    def get_short_name(self, stack: str) -> str:
        """Return the service's name without the prefix of its `stack`: the name of the run's node, or `rendezvous`."""
        return self.name.removeprefix(f"{stack}_")

    @property
    def api_path(self) -> str:
        """Path of the service in the engine's API."""
        return f"/services/{self.id}"

    @property
    def replicas(self) -> int:
        return int(self.spec["Mode"].get("Replicated", {}).get("Replicas", 0))

    @property
    def force_update(self) -> int:
        """Count that changes with each update that must restart the tasks although nothing else about them changes."""
        return int(self.spec["TaskTemplate"].get("ForceUpdate", 0))

    @property
    def is_node(self) -> bool:
        return self.labels.get(LABEL_ROLE) == ROLE_NODE

    @property
    def pinned_machine(self) -> str:
        """Id or host name of the machine to which the service is pinned; empty if it is not pinned."""
        for constraint in (self.spec["TaskTemplate"].get("Placement") or {}).get("Constraints") or []:
            key, _, value = (part.strip() for part in constraint.partition("=="))
            if key in ("node.id", "node.hostname"):
                return str(value)
        return ""

    @property
    def is_probe(self) -> bool:
        return bool(self.spec["TaskTemplate"].get("ContainerSpec", {}).get("Args") == [ROLE_PROBE])


@dataclass(frozen=True)
class Task:
    """A Swarm task: one container of a service. To restart a container, Swarm creates a new task."""

    id: str
    service_id: str
    node_id: str
    state: str
    desired_state: str
    reason: str
    exit_code: int | None
    created_at: str
    node_name: str = ""
    """Name of the run's node, or `rendezvous` for the coordinator's task."""
    stop_grace: float = 0.0
    """Seconds from the stop signal to the kill."""
    force_update: int = 0
    """The service's `force_update` when the task was created."""
    container_id: str = ""
    """Id of the task's container; empty before Swarm has created one."""
    gpus: tuple[str, ...] = ()
    """The GPUs or other resources assigned to the task: their ids, or the amount of each kind."""
    changed_at: float = 0.0
    """Time at which the task entered its state, in seconds since the epoch; 0 if it is unknown."""

    @property
    def is_final(self) -> bool:
        """Whether the task has ended and will not be restarted."""
        return self.state in FINAL_STATES


@dataclass(frozen=True)
class StackState:
    """All objects of the swarm with one stack's label, by full name. `network_ids` maps ids to the names of all networks of the swarm."""

    stack: str
    services: Mapping[str, Service]
    networks: Mapping[str, dict[str, Any]]
    configs: Mapping[str, str]
    secrets: Mapping[str, str]
    network_ids: Mapping[str, str]
    local_networks: frozenset[str] = frozenset()
    """Networks that exist only on this engine, not in the swarm."""
    swarm_subnets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The subnets of all networks of the swarm, by the network's name."""

    @property
    def is_empty(self) -> bool:
        return not (self.services or self.networks or self.configs or self.secrets)


def read_stack_state(engine: DockerEngine, stack: str) -> StackState:
    """Return the state of `stack`. Raises EngineError if the manager does not answer."""
    label = f"{LABEL_STACK}={stack}"
    networks = engine.list_objects("/networks")
    services = list_services(engine, stack)
    return StackState(
        stack=stack,
        services={service.name: service for service in services},
        networks={item["Name"]: item for item in networks if (item.get("Labels") or {}).get(LABEL_STACK) == stack},
        configs={item["Spec"]["Name"]: item["ID"] for item in engine.list_objects("/configs", label=label)},
        secrets={item["Spec"]["Name"]: item["ID"] for item in engine.list_objects("/secrets", label=label)},
        network_ids={item["Id"]: item["Name"] for item in networks} | _resolve_unlisted_networks(engine, services, networks),
        local_networks=frozenset(item["Name"] for item in networks if item.get("Scope") == "local"),
        swarm_subnets=map_swarm_subnets(networks),
    )


def map_swarm_subnets(networks: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the IPv4 subnets of those of `networks`, as the engine lists them, that are networks of the swarm, by their names."""
    return {
        item["Name"]: tuple(pool["Subnet"] for pool in (item.get("IPAM") or {}).get("Config") or [] if "." in pool.get("Subnet", ""))
        for item in networks
        if item.get("Scope") == "swarm"
    }


def _resolve_unlisted_networks(engine: DockerEngine, services: list[Service], networks: list[dict[str, Any]]) -> dict[str, str]:
    """Return the names, by id, of networks that services use but the engine does not list: the swarm's own host network."""
    targets = {network["Target"] for service in services for network in service.spec["TaskTemplate"].get("Networks") or []}
    names: dict[str, str] = {}
    for target in targets - {name for item in networks for name in (item["Id"], item["Name"])}:
        with contextlib.suppress(EngineError):  # the network has been removed
            names[target] = read_network_name(engine, target)
    return names


def read_network_name(engine: DockerEngine, network_id_or_name: str) -> str:
    """Return the name of the network that a service's spec refers to by id or by name. Raises EngineError."""
    return str(engine.get(f"/networks/{network_id_or_name}")["Name"])


def list_services(engine: DockerEngine, stack: str) -> list[Service]:
    """Return the services of `stack`: nodes first, ordered by node number. Raises EngineError."""
    services = [parse_service(item) for item in engine.list_objects("/services", label=f"{LABEL_STACK}={stack}")]
    return sorted(services, key=lambda service: (not service.is_node, build_natural_sort_key(service.name)))


def list_services_of_runs(engine: DockerEngine) -> list[tuple[str, Service]]:
    """Return the services of all runs with a valid name, each with the name of its run, ordered by run. Raises EngineError."""
    items = engine.list_objects("/services", label=LABEL_RUN)
    services = [(_get_stack_label(item), parse_service(item)) for item in items if is_valid_run_name(_get_stack_label(item))]
    return sorted(services, key=lambda pair: (pair[0], not pair[1].is_node, build_natural_sort_key(pair[1].name)))


def parse_service(api_object: dict[str, Any]) -> Service:
    """Return the service that the engine describes by `api_object`."""
    return Service(
        api_object["ID"], api_object["Version"]["Index"], api_object["Spec"], "PreviousSpec" in api_object, api_object["CreatedAt"]
    )


def list_run_services(engine: DockerEngine, run: str) -> list[Service]:
    """Return the services of `run`, nodes first. Raises RunNotFound if the run does not exist, or the stack is not a run of swarmtrain."""
    services = list_services(engine, run)
    if not any(LABEL_RUN in service.labels for service in services):
        raise build_run_not_found_error(engine, run)
    return services


def build_run_not_found_error(engine: DockerEngine, run: str) -> RunNotFound:
    """Return the error for a run that does not exist; its message lists the existing runs."""
    if run in list_terminating_runs(engine):
        hint = f"complete the removal with: swarmtrain down {run}"
        return RunNotFound("is being removed, or was only partially created", place=f"run {run}", hint=hint)
    known_runs = ", ".join(list_runs(engine)) or "none"
    message = f"unknown run on the swarm at {engine.address}; existing runs: {known_runs}"
    return RunNotFound(message, place=f"run {run}", hint="list all stacks with: docker stack ls")


def list_runs(engine: DockerEngine) -> list[str]:
    """Return the valid names of the stacks whose services have swarmtrain's label, sorted. Raises EngineError."""
    names = {_get_stack_label(item) for item in engine.list_objects("/services", label=LABEL_RUN)}
    return sorted(filter(is_valid_run_name, names))


def list_terminating_runs(engine: DockerEngine) -> list[str]:
    """Return the sorted names of runs whose services are removed but whose other objects or stopping tasks still exist.

    Raises EngineError.
    """
    configs = engine.list_objects("/configs")
    terminating = {
        _get_stack_label(item)
        for item in configs
        if _get_stack_label(item) and is_marker_config(_get_stack_label(item), item["Spec"]["Name"])
    }
    terminating |= {item["Spec"]["Labels"][LABEL_LOCK] for item in configs if LABEL_LOCK in (item["Spec"].get("Labels") or {})}
    stopping_tasks = [item for item in engine.list_objects("/tasks", label=LABEL_RUN) if item["DesiredState"] == "remove"]
    down_node_ids = read_down_nodes(engine) if stopping_tasks else {}
    terminating |= {
        _get_stack_label({"Spec": item["Spec"].get("ContainerSpec") or {}})
        for item in stopping_tasks
        if item.get("NodeID", "") not in down_node_ids
    }
    return sorted(terminating - {"", *map(_get_stack_label, engine.list_objects("/services"))})


def is_marker_config(stack: str, config_name: str) -> bool:
    """Return whether `config_name` is the marker of the stack: the config object by which a run is found after its services are removed."""
    return bool(_MARKER_CONFIG_PATTERN.fullmatch(config_name.removeprefix(f"{stack}_")))


def _get_stack_label(api_object: dict[str, Any]) -> str:
    return str((api_object["Spec"].get("Labels") or {}).get(LABEL_STACK, ""))


def list_tasks(engine: DockerEngine, stack: str) -> list[Task]:
    """Return all tasks of `stack` in Swarm's task history, oldest first, including those of removed services. Raises EngineError."""
    tasks = [parse_task(item) for item in engine.list_objects("/tasks", label=f"{LABEL_STACK}={stack}")]
    return sorted(tasks, key=lambda task: task.created_at)


def list_tasks_of_runs(engine: DockerEngine) -> list[Task]:
    """Return the tasks of all runs in Swarm's task history, oldest first. Raises EngineError."""
    return sorted((parse_task(item) for item in engine.list_objects("/tasks", label=LABEL_RUN)), key=lambda task: task.created_at)


def parse_task(api_object: dict[str, Any]) -> Task:
    """Return the task that the engine describes by `api_object`."""
    status = api_object.get("Status", {})
    container = status.get("ContainerStatus") or {}
    spec = api_object["Spec"].get("ContainerSpec") or {}
    return Task(
        id=api_object["ID"],
        service_id=api_object.get("ServiceID", ""),
        node_id=api_object.get("NodeID", ""),
        state=status.get("State", "new"),
        desired_state=api_object.get("DesiredState", ""),
        reason=status.get("Err", ""),
        exit_code=container.get("ExitCode") if status.get("State") in ("failed", "complete") else None,
        created_at=api_object["CreatedAt"],
        node_name=next(
            (setting.removeprefix(_NODE_PREFIX) for setting in spec.get("Env") or [] if setting.startswith(_NODE_PREFIX)),
            RENDEZVOUS_SERVICE,
        ),
        stop_grace=float(spec.get("StopGracePeriod", 10 * 10**9)) / 1e9,
        force_update=int(api_object["Spec"].get("ForceUpdate", 0)),
        container_id=container.get("ContainerID", ""),
        gpus=describe_resources(get_assigned_resources(api_object))
        if api_object.get("NodeID") and status.get("State") not in FINAL_STATES
        else (),
        changed_at=datetime.fromisoformat(status["Timestamp"]).timestamp() if "Timestamp" in status else 0.0,
    )


def find_newest_task(tasks: list[Task], service_id: str) -> Task | None:
    """Return the newest task of the service `service_id`; None if the service has no task."""
    return next((task for task in reversed(tasks) if task.service_id == service_id), None)


def is_service_finished(service: Service, tasks: Iterable[Task]) -> bool:
    """Return whether the newest task of `service` has completed, and Swarm will not restart it. `tasks` are ordered by creation.

    A service without replicas is not finished. A task from before the last update that restarts the tasks does not count.
    """
    newest = next((task for task in reversed(list(tasks)) if task.service_id == service.id), None)
    return (
        service.replicas > 0
        and newest is not None
        and newest.state == "complete"
        and newest.desired_state == "shutdown"
        and newest.force_update == service.force_update
    )


def find_replaced_task_ids(tasks: list[Task], service_id: str) -> frozenset[str]:
    """Return the ids of the tasks of a service that a newer task has replaced."""
    return frozenset([task.id for task in tasks if task.service_id == service_id][:-1])


def read_host_names(engine: DockerEngine) -> dict[str, str]:
    """Return the host name of each swarm node by node id. Raises EngineError."""
    return {node["ID"]: node["Description"]["Hostname"] for node in engine.list_objects("/nodes")}


def read_unavailable_hosts(engine: DockerEngine, tasks: Iterable[Task]) -> dict[str, str]:
    """Return the host names of the swarm's nodes that start no task: down, drained or paused. Empty if none of `tasks` waits for a node.

    Raises EngineError.
    """
    if not any(task.state == "pending" for task in tasks):
        return {}
    problems = {
        node["Description"]["Hostname"]: "down"
        if node["Status"]["State"] == "down"
        else _AVAILABILITY_WORDS.get(node["Spec"]["Availability"], "")
        for node in engine.list_objects("/nodes")
    }
    return {host: problem for host, problem in problems.items() if problem}


def list_managers(engine: DockerEngine) -> list[str]:
    """Return the host names of the swarm's managers, sorted. Raises EngineError."""
    return sorted((node["Description"]["Hostname"] for node in engine.list_objects("/nodes", role="manager")), key=build_natural_sort_key)


def read_down_nodes(engine: DockerEngine) -> dict[str, str]:
    """Return the host names, by node id, of nodes that the managers consider down. Raises EngineError."""
    return {node["ID"]: node["Description"]["Hostname"] for node in engine.list_objects("/nodes") if node["Status"]["State"] == "down"}


def read_inventory(engine: DockerEngine, nodes: Sequence[dict[str, Any]] | None = None) -> Inventory:
    """Return the inventory: the swarm's nodes in natural order of their names (node2 before node10). Raises EngineError.

    `nodes`: the nodes as the engine lists them, if they have been read already.
    """
    gpu_counts = read_gpu_counts(engine)
    machines = sorted(
        (_parse_machine(node, gpu_counts.get(node["ID"])) for node in (engine.list_objects("/nodes") if nodes is None else nodes)),
        key=lambda machine: (build_natural_sort_key(machine.host), machine.id),
    )
    count = f"{len(machines)} node{'' if len(machines) == 1 else 's'}"
    return Inventory(f"the swarm of {count} at {engine.endpoint}", tuple(machines))


def _parse_machine(node: dict[str, Any], gpu_count: int | None) -> Machine:
    description = node["Description"]
    unavailable_reason = describe_node_unavailability(node)
    return Machine(
        host=description["Hostname"],
        id=node["ID"],
        # Old engines show a leader's own address as 0.0.0.0; a manager's valid address is the one that it advertises to the others.
        address=(node.get("ManagerStatus") or {}).get("Addr", "").rpartition(":")[0].strip("[]") or node["Status"].get("Addr", ""),
        is_manager=node["Spec"]["Role"] == "manager",
        unavailable_reason=unavailable_reason,
        unavailable_hint=_suggest_availability_fix(description["Hostname"], unavailable_reason),
        labels=node["Spec"].get("Labels") or {},
        resources=count_resources_by_kind(description.get("Resources", {}).get("GenericResources") or []),
        gpu_count=gpu_count,
        cores=description.get("Resources", {}).get("NanoCPUs", 0) / 1e9,
        engine=description.get("Engine", {}).get("EngineVersion", ""),
    )


def describe_node_unavailability(node: dict[str, Any]) -> str:
    """Return in which state a node of the swarm is that starts no tasks: down, drained, paused ...; empty if it starts them."""
    if node["Status"]["State"] != "ready":
        return str(node["Status"]["State"])
    return {"drain": "drained", "pause": "paused"}.get(node["Spec"]["Availability"], "")


def _suggest_availability_fix(host: str, unavailable_reason: str) -> str:
    if unavailable_reason in ("drained", "paused"):
        return f"docker node update --availability active {host}"
    if unavailable_reason == UNKNOWN_STATE:
        return NEW_LEADER_HINT
    return "start the node; docker node ls shows when it is ready" if unavailable_reason else ""


def build_natural_sort_key(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key in which numbers in a name are compared as numbers."""
    return tuple((0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part)


def find_labelled_identity(services: Iterable[Service]) -> RunIdentity | None:
    """Return the identity in the labels of `services`; None if plain `docker stack deploy` has created them all."""
    return next((identity for service in services if (identity := RunIdentity.from_labels(service.labels))), None)


def find_identity(services: list[Service], stack: str) -> RunIdentity:
    """Return the identity of the run of `services`, of which there is at least one."""
    coordinator = find_coordinator(services, stack) or services[0]
    return find_labelled_identity(services) or RunIdentity.from_engine_object(coordinator.id, coordinator.created)


def find_coordinator(services: list[Service], stack: str) -> Service | None:
    """Return the rendezvous service, which runs the coordinator; None if it does not exist."""
    return next((service for service in services if service.name == f"{stack}_{RENDEZVOUS_SERVICE}"), None)
