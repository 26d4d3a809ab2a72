"""Overviews of all runs of the swarm, with one request for each kind of object, and one for the last events of each run."""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from swarmtrain.launchers.base import OVERVIEW_EVENTS, RunOverview
from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.protocol import RENDEZVOUS_SERVICE, Event

_THREADS = 8


def read_overviews(engine: DockerEngine) -> list[RunOverview]:
    """Return an overview of each run of the swarm, ordered by name. Raises EngineError."""
    services_by_run: dict[str, list[Service]] = defaultdict(list)
    for stack, service in cluster_state.list_services_of_runs(engine):
        services_by_run[stack].append(service)
    tasks, hosts = cluster_state.list_tasks_of_runs(engine), cluster_state.read_host_names(engine)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="events") as pool:
        events = pool.map(lambda item: _read_last_events(engine, *item), services_by_run.items())
        return [
            RunOverview(
                run,
                cluster_state.find_identity(services, run),
                tuple(cluster_state.build_task_state(service.get_short_name(run), tasks, service, hosts) for service in services),
                last_events,
            )
            for (run, services), last_events in zip(services_by_run.items(), events, strict=True)
        ]


def _read_last_events(engine: DockerEngine, run: str, services: list[Service]) -> tuple[Event, ...]:
    coordinator = cluster_state.find_coordinator(services, run)
    if coordinator is None:
        return ()
    lines = container_logs.read_log_lines(engine, coordinator.api_path, RENDEZVOUS_SERVICE, tail=OVERVIEW_EVENTS)
    return tuple(event for line in lines if (event := line.parse_event()))
