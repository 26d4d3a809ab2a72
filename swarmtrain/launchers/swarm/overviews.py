"""Overviews of all runs of the swarm, with one request for each kind of object, and one for the last events of each run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import OVERVIEW_EVENTS, QUEUED_STATE, RunOverview, TaskState
from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import LABEL_QUEUE, Service, Task
from swarmtrain.launchers.swarm.queue_entry import describe_malformed_run
from swarmtrain.launchers.swarm.resources.gang_queue import ResourceRequest, list_requests
from swarmtrain.launchers.swarm.task_states import build_task_states
from swarmtrain.launchers.swarm.timeouts import DEFAULT_TIMEOUTS, SwarmTimeouts
from swarmtrain.protocol import RENDEZVOUS_SERVICE
from swarmtrain.run_identity import RunIdentity

_THREADS = 8


def read_overviews(engine: DockerEngine, timeouts: SwarmTimeouts = DEFAULT_TIMEOUTS) -> list[RunOverview]:
    """Return an overview of each run of the swarm, ordered by name, then of each run that waits until its GPUs are free, in queue order.

    Raises EngineError.
    """
    # Entries are read before services: if a run's entry is already removed, its services exist, and are read next.
    requests = list_requests(engine.list_objects("/configs", label=LABEL_QUEUE), timeouts.queue_entry_ttl_seconds)
    services_by_run: dict[str, list[Service]] = defaultdict(list)
    for stack, service in cluster_state.list_services_of_runs(engine):
        services_by_run[stack].append(service)
    tasks, hosts = cluster_state.list_tasks_of_runs(engine), cluster_state.read_host_names(engine)
    unavailable_hosts = cluster_state.read_unavailable_hosts(engine, tasks)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="events") as pool:
        overviews = list(
            pool.map(
                lambda item: _read_overview(engine, item[0], item[1], tasks, hosts, unavailable_hosts=unavailable_hosts),
                services_by_run.items(),
            )
        )
    waiting = [request for request in requests if request.run not in services_by_run]
    return overviews + [_build_waiting_overview(request, request.identity) for request in waiting if request.identity]


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


def _build_waiting_overview(request: ResourceRequest, identity: RunIdentity) -> RunOverview:
    """Return the overview of a run that has no services yet, because it waits for resources."""
    reason = f"waits until all of its {request.kind} are free"
    tasks = tuple(TaskState(f"node{index}", "", QUEUED_STATE, reason) for index in range(len(request.amounts)))
    return RunOverview(request.run, identity, tasks, ())
