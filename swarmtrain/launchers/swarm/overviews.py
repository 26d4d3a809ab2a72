"""Overviews of all runs of the swarm, with one request for each kind of object, and one for the last events of each run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import OVERVIEW_EVENTS, RunOverview
from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service, Task
from swarmtrain.launchers.swarm.queue.queue_entry import describe_malformed_run
from swarmtrain.launchers.swarm.task_states import build_task_states
from swarmtrain.protocol import RENDEZVOUS_SERVICE

_THREADS = 8


def read_overviews(engine: DockerEngine) -> list[RunOverview]:
    """Return an overview of each run of the swarm, ordered by name. Raises EngineError."""
    services_by_run: dict[str, list[Service]] = defaultdict(list)
    for stack, service in cluster_state.list_services_of_runs(engine):
        services_by_run[stack].append(service)
    tasks, hosts = cluster_state.list_tasks_of_runs(engine), cluster_state.read_host_names(engine)
    unavailable_hosts = cluster_state.read_unavailable_hosts(engine, tasks)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="events") as pool:
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
