"""Submit a run to the queue: create its services without replicas, and complete its entry once all of them exist.

What is allocated to an existing run does not change: admitted nodes keep running, on the machines that the queue has given them. New nodes,
and those that a change moves to another machine, wait for the scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarmtrain.errors import StackError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.engine_values import parse_mapping
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service, StackState
from swarmtrain.launchers.swarm.queue.machine_settings import copy_machine_settings
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry, parse_entry, update_entry
from swarmtrain.launchers.swarm.reconcile import EndedRun, ObjectKind, ReconcileStep, StepVerb, reconcile
from swarmtrain.launchers.swarm.service_specs import ApiSpec, StackSpecs
from swarmtrain.planning.inventory import Inventory
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import LABEL_QUEUE_SETTINGS, LABEL_SLOTS, RENDEZVOUS_SERVICE
from swarmtrain.queue_labels import EntryState
from swarmtrain.render.process_environment import VISIBLE_DEVICES_VARIABLE

SCHEDULER_SERVICE = "swarmtrain-queue"
"""Name of the scheduler's service."""
LABEL_SCHEDULER_VERSION = "swarmtrain.scheduler.version"
"""Label of the scheduler's service and network."""


def is_scheduler_installed(engine: DockerEngine) -> bool:
    """Return whether the swarm has a scheduler, so that runs are queued. Raises EngineError."""
    return find_scheduler_service(engine) is not None


def find_scheduler_service(engine: DockerEngine) -> dict[str, Any] | None:
    """Return the service of the scheduler, as the engine describes it; None if the swarm has none. Raises EngineError."""
    services = engine.list_objects("/services", name=SCHEDULER_SERVICE, label=LABEL_SCHEDULER_VERSION)
    return next((service for service in services if service["Spec"]["Name"] == SCHEDULER_SERVICE), None)


def queue_specs(desired: StackSpecs, existing: StackState, ended_run: EndedRun | None, plan: Plan, inventory: Inventory) -> StackSpecs:
    """Return `desired`, the specs of `plan`, as a run in the queue: what is allocated stays, and everything else waits without replicas.

    A change after which the run would keep too few nodes stops the others, too: the run waits again, in its old position. The scheduler
    moves nodes on machines that are unavailable in `inventory`.
    """
    unavailable = {name for machine in inventory.machines if machine.unavailable_reason for name in (machine.id, machine.host)}
    desired = _leave_nodes_to_scheduler(desired, existing, unavailable)
    min_nodes = min(plan.min_nodes, plan.requested_node_count)
    return _keep_machines_of_waiting_nodes(_place_in_queue(desired, existing, ended_run, min_nodes), existing)


def write_entry_first(engine: DockerEngine, run: str, steps: Sequence[ReconcileStep]) -> None:
    """Write the entry that `steps` give to an existing run, before they change its nodes. Raises EngineError.

    A scheduler that found nodes half changed, because the deploy was killed, would otherwise complete what the old entry says.
    """
    coordinator = f"{run}_{RENDEZVOUS_SERVICE}"
    labels = next((step.spec["Labels"] for step in steps if step.name == coordinator and step.verb is StepVerb.update and step.spec), None)
    entry = parse_entry(labels) if labels else None
    if entry is not None:
        update_entry(engine, run, lambda _entry, _coordinator: entry)


def _place_in_queue(desired: StackSpecs, existing: StackState, ended_run: EndedRun | None, min_nodes: int) -> StackSpecs:
    coordinator_name = f"{desired.stack}_{RENDEZVOUS_SERVICE}"
    coordinator = existing.services.get(coordinator_name)
    entry = find_entry(existing)
    if entry is None:
        return _set_queue_state(desired, QueueEntry(EntryState.incomplete), {})
    if ended_run is not None:
        kept = _set_queue_state(desired, entry, {name: service.replicas for name, service in existing.services.items()})
        is_unchanged = not any(step.kind is ObjectKind.service for step in reconcile(kept, existing, ended_run))
        return kept if is_unchanged else _set_queue_state(desired, QueueEntry(EntryState.incomplete), {})
    coordinator_replicas = {coordinator_name: coordinator.replicas} if coordinator else {}
    if entry.state is EntryState.stopped:
        return _set_queue_state(desired, QueueEntry(EntryState.incomplete), coordinator_replicas)
    if entry.state is not EntryState.admitted:
        return _set_queue_state(desired, entry, coordinator_replicas)
    running = [service for service in existing.services.values() if service.is_node and service.replicas]
    is_sharing_changed = coordinator is not None and _is_shared(coordinator.spec) != _is_shared(desired.services[coordinator_name])
    kept_names = [
        service.name for service in running if not is_sharing_changed and _keeps_allocation(service, desired.services.get(service.name))
    ]
    if len(kept_names) < max(1, min(min_nodes, len(entry.machines))):
        waiting = entry.change_state(EntryState.incomplete, time.time(), reason="a deploy has changed the resources that it needs")
        return _set_queue_state(desired, waiting, coordinator_replicas)
    kept_nodes = {existing.services[name].get_short_name(desired.stack) for name in kept_names}
    machines = {node: machine for node, machine in entry.machines.items() if node in kept_nodes}
    return _set_queue_state(desired, replace(entry, machines=machines), coordinator_replicas | dict.fromkeys(kept_names, 1))


def find_entry(existing: StackState) -> QueueEntry | None:
    """Return the entry of an existing run in the queue; None if the run does not exist, or was deployed without the queue.

    A running run that was deployed without the queue gets an entry as if it had been admitted.
    """
    services = list(existing.services.values())
    coordinator = cluster_state.find_coordinator(services, existing.stack)
    if coordinator is None:
        return None
    entry = parse_entry(coordinator.labels)
    if entry is not None:
        return entry
    machines = {
        service.get_short_name(existing.stack): service.pinned_machine for service in services if service.is_node and service.replicas
    }
    return QueueEntry(EntryState.admitted if machines else EntryState.stopped, machines=machines, changed=time.time())


def complete_entry(engine: DockerEngine, run: str, report_progress: ProgressReporter) -> None:
    """Let the scheduler see the run, whose services all exist now. Raises EngineError; StackError if the run was removed meanwhile."""

    def complete(entry: QueueEntry, coordinator: Service) -> QueueEntry:
        if entry.state is not EntryState.incomplete:
            return entry
        # The version index grows with every change in the swarm, so it orders the runs without any clock.
        position = entry.position or float(coordinator.version)
        return replace(entry.change_state(EntryState.waiting, time.time(), reason=entry.reason), position=position)

    entry = update_entry(engine, run, complete)
    if entry is None:
        raise StackError("was removed during this deploy", place=f"run {run}", hint="deploy again")
    if entry.state is EntryState.waiting:
        report_progress(f"{run} is in the queue")


def record_stop(engine: DockerEngine, run: str, reason: str) -> None:
    """Let the scheduler know that `run`, if it is in the queue, was stopped and must not start again. Raises EngineError."""

    def stop(entry: QueueEntry, _coordinator: Service) -> QueueEntry:
        is_stopped = entry.state is EntryState.stopped
        return entry if is_stopped else entry.change_state(EntryState.stopped, time.time(), reason=reason)

    update_entry(engine, run, stop)


def _keeps_allocation(service: Service, desired: ApiSpec | None) -> bool:
    """Return whether a node keeps its machine and its resources there in its desired spec."""
    if desired is None:
        return False
    return (
        service.pinned_machine == replace(service, spec=desired).pinned_machine
        and _list_allocated_resources(service.spec) == _list_allocated_resources(desired)
        and service.labels.get(LABEL_SLOTS) == desired["Labels"].get(LABEL_SLOTS)
        and _get_visible_devices(service.spec) == _get_visible_devices(desired)
    )


def _is_shared(coordinator_spec: ApiSpec) -> bool:
    """Return whether the run shares its machines with other runs, by the labels of its coordinator."""
    return bool(parse_mapping(coordinator_spec["Labels"].get(LABEL_QUEUE_SETTINGS)).get("share"))


def _list_allocated_resources(spec: ApiSpec) -> tuple[Any, Any]:
    """Return the reservations of a service, and its limit of cores: not its limit of memory, for which the queue does not account."""
    resources = spec["TaskTemplate"].get("Resources") or {}
    return resources.get("Reservations") or {}, (resources.get("Limits") or {}).get("NanoCPUs")


def _get_visible_devices(spec: ApiSpec) -> str:
    prefix = f"{VISIBLE_DEVICES_VARIABLE}="
    return next((item for item in spec["TaskTemplate"]["ContainerSpec"].get("Env") or [] if item.startswith(prefix)), "")


def _set_queue_state(desired: StackSpecs, entry: QueueEntry, replicas: Mapping[str, int]) -> StackSpecs:
    """Return `desired` with `entry`, and with the given numbers of replicas by service; 0 for others."""
    services = {}
    for name, spec in desired.services.items():
        labels = entry.to_labels() if name == f"{desired.stack}_{RENDEZVOUS_SERVICE}" else {}
        mode = {"Replicated": {"Replicas": replicas.get(name, 0)}}
        services[name] = {**spec, "Labels": {**spec["Labels"], **labels}, "Mode": mode}
    return replace(desired, services=services)


def _leave_nodes_to_scheduler(desired: StackSpecs, existing: StackState, unavailable_machines: Collection[str]) -> StackSpecs:
    """Return `desired` in which running nodes on unavailable machines keep their machines, until the scheduler gives them others."""
    services = {
        name: copy_machine_settings(spec, existing.services[name].spec)
        if name in existing.services
        and existing.services[name].is_node
        and existing.services[name].replicas
        and existing.services[name].pinned_machine in unavailable_machines
        else spec
        for name, spec in desired.services.items()
    }
    return replace(desired, services=services)


def _keep_machines_of_waiting_nodes(desired: StackSpecs, existing: StackState) -> StackSpecs:
    """Return `desired` in which the nodes without replicas keep the machines of their existing services, which have no effect yet."""
    services = {
        name: copy_machine_settings(spec, existing.services[name].spec)
        if name in existing.services and existing.services[name].is_node and not spec["Mode"]["Replicated"]["Replicas"]
        else spec
        for name, spec in desired.services.items()
    }
    return replace(desired, services=services)
