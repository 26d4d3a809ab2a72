"""States of the services of runs, in Swarm's terms, and overviews of all runs, as the launcher reports them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import OVERVIEW_EVENTS, QUEUED_STATE, RunOverview, TaskExit, TaskState
from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service, Task, find_newest_task
from swarmtrain.launchers.swarm.queue.queue_entry import describe_malformed_run, find_queue_entry
from swarmtrain.protocol import EXIT_PLANNED, LABEL_HOST, RENDEZVOUS_SERVICE
from swarmtrain.queue_labels import EntryState

_OVERVIEW_THREADS = 8


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


def read_overviews(engine: DockerEngine) -> list[RunOverview]:
    """Return an overview of each run of the swarm, ordered by name. Raises EngineError.

    Makes one request for each kind of object, and one for the last events of each run.
    """
    services_by_run: dict[str, list[Service]] = defaultdict(list)
    for stack, service in cluster_state.list_services_of_runs(engine):
        services_by_run[stack].append(service)
    tasks, hosts = cluster_state.list_tasks_of_runs(engine), cluster_state.read_host_names(engine)
    unavailable_hosts = cluster_state.read_unavailable_hosts(engine, tasks)
    with ThreadPoolExecutor(_OVERVIEW_THREADS, thread_name_prefix="events") as pool:
        return list(
            pool.map(
                lambda item: _read_overview(engine, item[0], item[1], tasks, hosts, unavailable_hosts=unavailable_hosts),
                services_by_run.items(),
            )
        )


def _read_overview(
    engine: DockerEngine,
    run: str,
    services: list[Service],
    tasks: list[Task],
    hosts: Mapping[str, str],
    *,
    unavailable_hosts: Mapping[str, str],
) -> RunOverview:
    """Return the overview of `run`, with the reason if its events cannot be read, for example because it is removed meanwhile."""
    identity = cluster_state.find_identity(services, run)
    states = tuple(build_task_states(run, services, tasks, hosts, unavailable_hosts))
    coordinator = cluster_state.find_coordinator(services, run)
    note = describe_malformed_run(services)
    if coordinator is None:
        return RunOverview(run, identity, states, (), note=note)
    try:
        lines = container_logs.read_log_lines(engine, coordinator.api_path, RENDEZVOUS_SERVICE, tail=OVERVIEW_EVENTS)
    except EngineError as error:
        return RunOverview(run, identity, states, (), error=error.message, note=note)
    return RunOverview(run, identity, states, tuple(event for line in lines if (event := line.parse_event())), note=note)
