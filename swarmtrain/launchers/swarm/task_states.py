"""States of a run's services, in Swarm's terms, as the launcher reports them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from swarmtrain.launchers.base import QUEUED_STATE, TaskExit, TaskState
from swarmtrain.launchers.swarm.cluster_state import Service, Task, find_newest_task
from swarmtrain.launchers.swarm.queue.queue_entry import find_queue_entry
from swarmtrain.protocol import EXIT_PLANNED, LABEL_HOST
from swarmtrain.queue_labels import EntryState


def build_task_states(
    run: str,
    services: Sequence[Service],
    tasks: Sequence[Task],
    host_name_by_node_id: Mapping[str, str],
    unavailable_hosts: Mapping[str, str] = MappingProxyType({}),
) -> list[TaskState]:
    """Return the states of the services of `run`. Those that the queue has not started yet are queued, with the reason.

    `unavailable_hosts`: the machines that start no task, with their states.
    """
    states = [
        build_task_state(service.get_short_name(run), list(tasks), service, host_name_by_node_id, unavailable_hosts) for service in services
    ]
    entry = find_queue_entry(services, run)
    if entry is None:
        return states
    if entry.state is EntryState.stopped:
        return [replace(state, reason=entry.reason) if state.state == "stopped" else state for state in states]
    reason = "waits for a free machine" if entry.state is EntryState.admitted else entry.reason
    return [replace(state, host="", state=QUEUED_STATE, reason=reason) if state.state == "stopped" else state for state in states]


def build_task_state(
    node_name: str,
    tasks: list[Task],
    service: Service,
    host_name_by_node_id: Mapping[str, str],
    unavailable_hosts: Mapping[str, str] = MappingProxyType({}),
) -> TaskState:
    """Return the state of `service` as a TaskState, in Swarm's terms.

    While a task is pending, `reason` states why the previous task ended.
    """
    task = find_newest_task(tasks, service.id)
    exits = _list_exits(node_name, tasks, service)
    host = service.labels.get(LABEL_HOST, "")
    if task is None or (service.replicas == 0 and task.is_final):
        return TaskState(node_name, host, "stopped" if service.replicas == 0 else "new", exits=exits)
    reason = task.reason
    if not reason and not task.is_final and task.state != "running":
        earlier_failures = [
            candidate for candidate in tasks if candidate.service_id == service.id and candidate.id != task.id and candidate.reason
        ]
        reason = f"restarting after: {earlier_failures[-1].reason}" if earlier_failures else ""
    host = host_name_by_node_id.get(task.node_id, host)
    machine_problem = unavailable_hosts.get(host, "") if task.state == "pending" else ""
    return TaskState(node_name, host, task.state, reason, task.exit_code, task.gpus, exits, machine_problem)


def _list_exits(node_name: str, tasks: list[Task], service: Service) -> tuple[TaskExit, ...]:
    """Return the exits of the service's containers that nobody had requested."""
    failed = [task for task in tasks if task.service_id == service.id and task.state == "failed" and task.exit_code != EXIT_PLANNED]
    return tuple(TaskExit(node_name, task.changed_at, task.exit_code, task.reason) for task in failed)


def list_stopping_nodes(tasks: list[Task], services: list[Service], host_name_by_node_id: Mapping[str, str]) -> list[TaskState]:
    """Return the states of nodes whose services are removed but whose containers still run."""
    service_ids = {service.id for service in services}
    leftover = [task for task in tasks if task.service_id not in service_ids and task.node_id and not task.is_final]
    return [
        TaskState(task.node_name, host_name_by_node_id.get(task.node_id, ""), "stopping", "its service is removed") for task in leftover
    ]
