"""Read the state of the queue from the swarm: machines, runs with their entries, and what is allocated to everything else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swarmtrain.config import Config
from swarmtrain.config.schema.queue_policy import QueuePolicy
from swarmtrain.errors import EngineError, SwarmtrainError
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.engine_values import parse_count, parse_environment
from swarmtrain.launchers.swarm import cluster_state, deployed_run
from swarmtrain.launchers.swarm.cluster_state import Service, Task
from swarmtrain.launchers.swarm.machines.generic_resources import count_resources_by_kind, get_assigned_resources
from swarmtrain.launchers.swarm.queue.policy_store import find_policy_id, read_policy
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry, describe_malformed_run, parse_entry
from swarmtrain.planning.inventory import Inventory, Machine
from swarmtrain.planning.node_selection import PlannedNode, select_nodes
from swarmtrain.planning.placement import FRESH_PLACEMENT
from swarmtrain.protocol import LABEL_HOSTS, LABEL_QUEUE_SETTINGS, LABEL_RUN, LABEL_SLOTS, LABEL_STACK, RENDEZVOUS_SERVICE
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.queue_model import (
    CORES,
    Allocation,
    ExternalAllocation,
    MachineSupply,
    OwnerLimit,
    QueuedRun,
    QueueSnapshot,
)
from swarmtrain.queueing.resource_allocation import build_capacity, compute_allocation, compute_running_allocation
from swarmtrain.render.process_environment import HIDDEN_GPUS_ENV, VISIBLE_DEVICES_VARIABLE

ApiObject = dict[str, Any]
_OUTSIDE = "a service outside any stack"
_DOWN = "down"
_LOST_REASONS = (_DOWN, "drained")


@dataclass(frozen=True)
class QueueMember:
    """A run with an entry in the queue, as it is stored in the swarm."""

    run: str
    services: tuple[Service, ...]
    coordinator: Service
    entry: QueueEntry
    identity: RunIdentity
    tasks: tuple[Task, ...]
    config: Config | None
    """The config as the nodes receive it; None if this version of swarmtrain cannot read it."""
    problem: str = ""
    """Why the run cannot be scheduled; empty if it can."""
    down_machines: frozenset[str] = frozenset()
    """Ids of the machines that are down: Swarm does not know, for up to a day, whether the containers on them still run."""

    @property
    def malformed_labels(self) -> str:
        """Which labels of the run are malformed, and ignored; empty if none is."""
        return describe_malformed_run(self.services)

    @property
    def nodes(self) -> tuple[Service, ...]:
        """The services of the nodes."""
        return tuple(service for service in self.services if service.is_node)

    @property
    def has_running_nodes(self) -> bool:
        """Whether a container of a node still runs, or will."""
        node_ids = {service.id for service in self.nodes}
        return any(service.replicas for service in self.nodes) or any(
            task.service_id in node_ids and task.node_id and not task.is_final and task.node_id not in self.down_machines
            for task in self.tasks
        )

    @property
    def has_ended(self) -> bool:
        """Whether the run has its outcome: its coordinator has exited, or all its nodes have.

        Swarm starts a coordinator again whose machine is lost between the outcome and its exit, and it then waits for nodes forever.
        """
        nodes = [service for service in self.nodes if service.replicas]
        have_nodes_ended = bool(nodes) and all(cluster_state.is_service_finished(service, self.tasks) for service in nodes)
        return have_nodes_ended or self.has_coordinator_exited

    @property
    def has_coordinator_exited(self) -> bool:
        """Whether the coordinator has exited after the outcome: a node that starts now waits for it in vain."""
        return cluster_state.is_service_finished(self.coordinator, self.tasks)


@dataclass(frozen=True)
class QueueState:
    """The queue and everything that it depends on, at one moment."""

    snapshot: QueueSnapshot
    members: Mapping[str, QueueMember]
    policy: QueuePolicy
    inventory: Inventory

    def list_ends(self) -> dict[str, float]:
        """Return in how many seconds the admitted runs with a time limit end."""
        return {
            run.run: max(0.0, run.time_limit)
            for run in self.snapshot.runs
            if run.time_limit is not None and run.state is EntryState.admitted and not run.is_finished
        }


@dataclass
class QueueReader:
    """Reads the state of the queue, and remembers what does not change: configs, and what their nodes need on the same machines."""

    engine: DockerEngine
    _configs: dict[tuple[str, str, str], Config] = field(default_factory=dict)
    _needs: dict[tuple[str, str, str], dict[str, Allocation]] = field(default_factory=dict)
    _used_keys: set[tuple[str, str, str]] = field(default_factory=set)
    _inventory: Inventory | None = None
    _task_objects: dict[str, ApiObject] = field(default_factory=dict)
    """The current tasks by id, as the engine describes them."""
    _policy: tuple[str, QueuePolicy] | None = None

    def read_state(self, now: float) -> QueueState:
        """Return the state at the time `now`, in seconds since the epoch. Raises EngineError, ConfigError."""
        nodes = self.engine.list_objects("/nodes")
        services = self.engine.list_objects("/services")
        task_objects = self.engine.list_objects("/tasks")
        inventory = cluster_state.read_inventory(self.engine, nodes)
        if inventory != self._inventory:
            self._inventory, self._needs = inventory, {}
        policy = self._read_policy()
        tasks = [cluster_state.parse_task(item) for item in sorted(task_objects, key=lambda item: str(item["CreatedAt"]))]
        self._task_objects = {item["ID"]: item for item in task_objects}
        self._used_keys = set()
        members = self._read_members(services, tasks)
        runs = tuple(self._build_run(member, policy, now) for member in members.values())
        external_allocations = self._list_external_allocations(services, task_objects, tasks, members.keys())
        self._configs = {key: config for key, config in self._configs.items() if key in self._used_keys}
        self._needs = {key: needs for key, needs in self._needs.items() if key in self._used_keys}
        machines = tuple(map(_build_supply, inventory.machines))
        limits = {owner: OwnerLimit(limit.gpus, limit.nodes, limit.runs) for owner, limit in policy.limits.items()}
        return QueueState(QueueSnapshot(machines, runs, external_allocations, limits), members, policy, inventory)

    def _read_policy(self) -> QueuePolicy:
        policy_id = find_policy_id(self.engine)
        if self._policy is None or self._policy[0] != policy_id:
            self._policy = (policy_id, read_policy(self.engine))
        return self._policy[1]

    def _read_members(self, service_objects: Sequence[ApiObject], tasks: Sequence[Task]) -> dict[str, QueueMember]:
        tasks_by_service: dict[str, list[Task]] = defaultdict(list)
        for task in tasks:
            tasks_by_service[task.service_id].append(task)
        services_by_run: dict[str, list[Service]] = defaultdict(list)
        for item in service_objects:
            service = cluster_state.parse_service(item)
            if LABEL_RUN in service.labels and service.labels.get(LABEL_STACK):
                services_by_run[service.labels[LABEL_STACK]].append(service)
        members = {}
        for run, services in sorted(services_by_run.items()):
            services.sort(key=lambda service: (not service.is_node, cluster_state.build_natural_sort_key(service.name)))
            coordinator = cluster_state.find_coordinator(services, run)
            entry = parse_entry(coordinator.labels) if coordinator else None
            if coordinator and entry:
                run_tasks = tuple(task for service in services for task in tasks_by_service[service.id])
                members[run] = self._build_member(run, services, coordinator, entry, run_tasks)
        return members

    def _build_member(
        self, run: str, services: Sequence[Service], coordinator: Service, entry: QueueEntry, tasks: tuple[Task, ...]
    ) -> QueueMember:
        config, problem = None, ""
        try:
            config = self._read_config(services, run)
        except EngineError:
            raise
        except SwarmtrainError as error:
            problem = error.message
        identity = cluster_state.find_identity(list(services), run)
        # A run that was deployed before there was a queue has host names in its entry.
        ids = {name: machine.id for machine in (self._inventory.machines if self._inventory else ()) for name in (machine.host, machine.id)}
        entry = replace(entry, machines={node: ids.get(name, name) for node, name in entry.machines.items()})
        down = frozenset(machine.id for machine in (self._inventory.machines if self._inventory else ()) if _is_down(machine))
        return QueueMember(run, tuple(services), coordinator, entry, identity, tasks, config, problem, down)

    def _read_config(self, services: Sequence[Service], run: str) -> Config:
        key = _build_config_key(services, run)
        self._used_keys.add(key)
        if key not in self._configs:
            self._configs[key] = deployed_run.read_sent_config(self.engine, services, run)
        return self._configs[key]

    def _build_run(self, member: QueueMember, policy: QueuePolicy, now: float) -> QueuedRun:
        config, entry = member.config, member.entry
        needs = self._list_cached_needs(member) if config else self._list_running_allocations(member, set(entry.machines.values()))
        runner = config.runner if config else None
        node_count = len(member.nodes)
        limit = None
        if runner and runner.time_limit is not None:
            limit = runner.time_limit - entry.trained_seconds
            limit -= max(0.0, now - entry.changed) if entry.state is EntryState.admitted else 0.0
        return QueuedRun(
            run=member.run,
            owner=member.identity.owner,
            priority=policy.classes.get((runner.priority if runner else None) or policy.default_class, 0),
            position=entry.position,
            # A run that cannot be read keeps its machines, and is not started.
            state=EntryState.stopped if member.problem and entry.state is EntryState.waiting else entry.state,
            needs=needs,
            min_nodes=min(runner.node_range[0], node_count) if runner else node_count,
            nodes=node_count,
            allocated=frozenset(entry.machines.values()),
            leaving=self._list_leaving_nodes(member),
            is_preemptible=runner.preemptible if runner else False,
            is_finished=member.has_ended,
            time_limit=limit,
        )

    def _list_cached_needs(self, member: QueueMember) -> dict[str, Allocation]:
        key = _build_config_key(member.services, member.run)
        if key not in self._needs and member.config and self._inventory:
            try:
                self._needs[key] = compute_needs(member.config, self._inventory)
            except SwarmtrainError:  # such as a listed host that is ambiguous now
                self._needs[key] = {}
        return self._needs.get(key, {})

    def _list_leaving_nodes(self, member: QueueMember) -> dict[str, Allocation]:
        """Return what containers of nodes that are not admitted any more still use, by machine; without machines that are down."""
        admitted = set(member.entry.machines.values()) if member.entry.state is EntryState.admitted and not member.has_ended else set()
        up = {machine.id for machine in (self._inventory.machines if self._inventory else ()) if not _is_down(machine)}
        return self._list_running_allocations(member, up - admitted)

    def _list_running_allocations(self, member: QueueMember, machine_ids: Collection[str]) -> dict[str, Allocation]:
        """Return what the containers of the run's nodes on these machines use, by machine."""
        node_ids = {service.id for service in member.nodes}
        machines = {machine.id: machine for machine in (self._inventory.machines if self._inventory else ()) if machine.id in machine_ids}
        return {
            task.node_id: compute_running_allocation(self._task_objects[task.id], machines[task.node_id])
            for task in member.tasks
            if task.service_id in node_ids and not task.is_final and task.node_id in machines
        }

    def _list_external_allocations(
        self, service_objects: Sequence[ApiObject], task_objects: Sequence[ApiObject], tasks: Sequence[Task], members: Any
    ) -> tuple[ExternalAllocation, ...]:
        """Return what is allocated to runs without an entry in the queue, and to services that are not runs."""
        inventory = self._inventory or Inventory("", ())
        machines = {machine.id: machine for machine in inventory.machines}
        ids_by_name = {name: machine.id for machine in inventory.machines for name in (machine.host, machine.id)}
        external_allocations, covered = [], set()
        services_of_runs: dict[str, list[Service]] = defaultdict(list)
        for item in service_objects:
            service = cluster_state.parse_service(item)
            stack = service.labels.get(LABEL_STACK, "")
            if stack in members:
                covered.add(service.id)
            elif LABEL_RUN in service.labels and stack:
                services_of_runs[stack].append(service)
        for run, services in services_of_runs.items():
            config = self._try_read_config(services, run)
            for service in services:
                machine = machines.get(ids_by_name.get(service.pinned_machine, ""))
                if not (config and machine and service.is_node):
                    continue
                covered.add(service.id)
                service_tasks = [task for task in tasks if task.service_id == service.id]
                if service.replicas and not cluster_state.is_service_finished(service, service_tasks):
                    allocation = compute_allocation(config.runner, _rebuild_planned_node(service, machine), machine)
                    external_allocations.append(ExternalAllocation(run, machine.id, allocation))
                elif any(not task.is_final for task in service_tasks):
                    allocation = compute_allocation(config.runner, _rebuild_planned_node(service, machine), machine)
                    external_allocations.append(ExternalAllocation(f"{run}, which stops", machine.id, allocation))
        for item in task_objects:
            if item.get("ServiceID") not in covered and item.get("NodeID") and item["Status"]["State"] not in cluster_state.FINAL_STATES:
                machine = machines.get(item["NodeID"])
                is_node = cluster_state.parse_task(item).node_name != RENDEZVOUS_SERVICE  # of a run that is being removed
                allocation = compute_running_allocation(item, machine) if is_node and machine else _compute_reserved_allocation(item)
                if allocation.exclusive:
                    labels = (item["Spec"].get("ContainerSpec") or {}).get("Labels") or {}
                    external_allocations.append(ExternalAllocation(labels.get(LABEL_STACK) or _OUTSIDE, item["NodeID"], allocation))
        return tuple(external_allocations)

    def _try_read_config(self, services: Sequence[Service], run: str) -> Config | None:
        try:
            return self._read_config(services, run)
        except EngineError:
            raise
        except SwarmtrainError:
            return None


def compute_needs(config: Config, inventory: Inventory) -> dict[str, Allocation]:
    """Return what a node of a run with `config` needs on each machine of `inventory` that the config allows, in the order of use.

    Raises PlanError.
    """
    host_count = len(config.runner.hosts) if config.runner.hosts else len(inventory.machines)
    nodes = select_nodes(config, inventory, max(1, host_count), FRESH_PLACEMENT, min_nodes=0)
    needs = {}
    for node in nodes:
        machine = find_machine(inventory, node)
        if machine is not None:
            needs[machine.id] = compute_allocation(config.runner, node, machine)
    return needs


def find_machine(inventory: Inventory, node: PlannedNode) -> Machine | None:
    """Return the machine to which `node` is pinned; None if it is not in the swarm."""
    key, _, name = node.constraint.partition("==")
    matching = [machine for machine in inventory.machines if (machine.id if key == "node.id" else machine.host) == name]
    return min(matching, key=lambda machine: bool(machine.unavailable_reason), default=None)


def _is_down(machine: Machine) -> bool:
    return machine.unavailable_reason == _DOWN


def _build_supply(machine: Machine) -> MachineSupply:
    reason = machine.unavailable_reason
    return MachineSupply(machine.id, machine.host, build_capacity(machine), not reason, is_lost=reason in _LOST_REASONS)


def _build_config_key(services: Sequence[Service], run: str) -> tuple[str, str, str]:
    """Return a key for the config of a run: the id of its object, and the labels with the settings that the object does not contain."""
    coordinator = cluster_state.find_coordinator(list(services), run)
    labels = coordinator.labels if coordinator else {}
    return deployed_run.get_config_id(services, run), labels.get(LABEL_HOSTS, ""), labels.get(LABEL_QUEUE_SETTINGS, "")


def _rebuild_planned_node(service: Service, machine: Machine) -> PlannedNode:
    """Return the part of the planned node of `service` that its resources depend on."""
    variables = parse_environment((service.spec["TaskTemplate"].get("ContainerSpec") or {}).get("Env"))
    visible = variables.get(VISIBLE_DEVICES_VARIABLE, "")
    gpus = () if visible in ("", "all", HIDDEN_GPUS_ENV[VISIBLE_DEVICES_VARIABLE]) else tuple(visible.split(","))
    slots = parse_count(service.labels.get(LABEL_SLOTS), default=1)
    return PlannedNode(service.name, machine.host, "", slots, "", gpus)


def _compute_reserved_allocation(task: ApiObject) -> Allocation:
    """Return what a task has reserved in Swarm: generic resources and cores."""
    amounts = {kind: float(count) for kind, count in count_resources_by_kind(get_assigned_resources(task)).items()}
    reservations = (task["Spec"].get("Resources") or {}).get("Reservations") or {}
    if cores := reservations.get("NanoCPUs", 0) / 1e9:
        amounts[CORES] = cores
    return Allocation(amounts)


def format_amounts(amounts: Mapping[str, float]) -> str:
    """Return `amounts` as text: 4 NVIDIA-GPU, 16 cores."""
    return ", ".join(f"{amount:.4g} {name}" for name, amount in sorted(amounts.items(), key=lambda item: item[0] == CORES))
