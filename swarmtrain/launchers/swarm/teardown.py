"""Remove a stack, or stop only its nodes, and wait until the removal is complete.

`docker stack rm` returns while tasks still stop and the network is still in use, which is why a deploy right after it fails. This
module removes each kind of object only after the previous kind is gone, and also removes leftovers of earlier attempts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from swarmtrain.errors import EngineError, StackError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.launchers.swarm.following.update_stream import record_final_log_lines
from swarmtrain.launchers.swarm.step_executor import LockCheck, run_in_parallel, scale_service_to_zero

_POLL_SECONDS = 0.3
_LOG_INTERVAL_SECONDS = 5.0
# Seconds added to the stop grace period: Swarm waits 2 s before it sends the signal, and deletes tasks with a delay.
_STOP_MARGIN_SECONDS = 60.0
_NETWORK_TIMEOUT_SECONDS = 60.0


def tear_down_stack(engine: DockerEngine, stack: str, report_progress: ProgressReporter, check_lock: LockCheck = lambda: None) -> None:
    """Remove all objects with the label of `stack`, and wait until they are gone. Raises StackError if that takes too long.

    `check_lock` is called before each change, and raises if the lock is lost, so that no more changes may be made.
    """
    services = cluster_state.list_services(engine, stack)
    with record_final_log_lines(engine, stack, services):
        for group in _group_services_for_removal(services):
            _remove_services(engine, stack, group, report_progress, check_lock)
        wait_until_tasks_cleared(engine, stack, report_progress)  # meanwhile, the last output of the tasks is recorded
    check_lock()
    existing = cluster_state.read_stack_state(engine, stack)
    for name, network in existing.networks.items():
        _remove_network(engine, network["Id"], name, report_progress)
    check_lock()
    for secret in existing.secrets.values():
        engine.delete(f"/secrets/{secret}")
    for config in _list_config_ids_marker_last(existing):
        engine.delete(f"/configs/{config}")
    _wait_until_none_remain(f"objects of {stack}", _STOP_MARGIN_SECONDS, report_progress, lambda: _list_remaining_objects(engine, stack))


def roll_back_deploy(
    engine: DockerEngine, stack: str, created_names: Collection[str], report_progress: ProgressReporter, check_lock: LockCheck
) -> None:
    """Remove the stack of a first deploy that has failed, except services that another command has created or changed since.

    `created_names` contains the names of the objects that the deploy has created. Raises StackError, EngineError.
    """
    services = cluster_state.list_services(engine, stack)
    ours = [service for service in services if service.name in created_names and not service.is_modified]
    if len(ours) == len(services):
        tear_down_stack(engine, stack, report_progress, check_lock)
        return
    kept_names = ", ".join(service.name for service in services if service not in ours)
    report_progress(f"another command has created or changed {kept_names}: not removed, nor the objects that it uses")
    _remove_services(engine, stack, ours, report_progress, check_lock)


def _list_config_ids_marker_last(existing: cluster_state.StackState) -> list[str]:
    """Return the ids of the configs with the marker last: by the marker, a partly removed run is found."""
    return [
        existing.configs[name] for name in sorted(existing.configs, key=lambda name: cluster_state.is_marker_config(existing.stack, name))
    ]


def _remove_services(
    engine: DockerEngine, stack: str, services: list[Service], report_progress: ProgressReporter, check_lock: LockCheck
) -> None:
    if not services:
        return
    check_lock()
    report_progress(f"removing {', '.join(service.name for service in services)}")
    run_in_parallel(lambda service: engine.delete(f"/services/{service.id}"), services)
    wait_until_services_stopped(engine, stack, services, report_progress)


def wait_until_services_stopped(engine: DockerEngine, stack: str, services: list[Service], report_progress: ProgressReporter) -> None:
    """Wait until no container of `services` is running. Raises StackError if one still is after its grace period plus 1 min."""
    service_ids = {service.id for service in services}
    grace = max((_get_stop_grace_period(service) for service in services), default=0.0)
    _wait_until_none_remain(
        "their containers",
        grace + _STOP_MARGIN_SECONDS,
        report_progress,
        lambda: _describe_running_tasks(engine, stack, service_ids, report_progress),
    )


def wait_until_tasks_cleared(engine: DockerEngine, stack: str, report_progress: ProgressReporter) -> None:
    """Wait until Swarm has deleted the tasks of removed services: until then they keep the network in use.

    Raises StackError if the tasks remain after their grace period plus 1 min.
    """
    orphans = _list_orphaned_tasks(engine, stack)
    grace = max((task.stop_grace for task in orphans), default=0.0)
    _wait_until_none_remain(
        f"tasks of {stack} that are shutting down",
        grace + _STOP_MARGIN_SECONDS,
        report_progress,
        lambda: _describe_uncleared_tasks(engine, stack),
    )


def stop_nodes(engine: DockerEngine, stack: str, services: list[Service], report_progress: ProgressReporter, check_lock: LockCheck) -> None:
    """Set the replicas of the node services to 0, and wait until none of their containers runs. Raises StackError, EngineError.

    The coordinator is kept, and with it the state of the run.
    """
    nodes = [service for service in services if service.is_node]
    running = [service for service in nodes if service.replicas]
    with record_final_log_lines(engine, stack, nodes):
        if running:
            check_lock()
            report_progress(f"stopping {', '.join(service.name for service in running)}")
            run_in_parallel(lambda service: scale_service_to_zero(engine, service), running)
        wait_until_services_stopped(engine, stack, nodes, report_progress)


def _group_services_for_removal(services: list[Service]) -> list[list[Service]]:
    """Return the services in groups, in the order of removal. The coordinator comes last: ranks that save before they exit still need it.

    A probe has nothing to save, and is removed at once.
    """
    if any(service.is_probe for service in services):
        return [services]
    return [[service for service in services if service.is_node], [service for service in services if not service.is_node]]


def _get_stop_grace_period(service: Service) -> float:
    container = service.spec["TaskTemplate"].get("ContainerSpec", {})
    return float(container.get("StopGracePeriod", 10 * 10**9)) / 1e9


def _describe_running_tasks(engine: DockerEngine, stack: str, service_ids: set[str], report_progress: ProgressReporter) -> list[str]:
    """Return a description of each task of the services whose container may still run. Tasks on nodes that are down are omitted."""
    running = [
        task for task in cluster_state.list_tasks(engine, stack) if task.service_id in service_ids and task.node_id and not task.is_final
    ]
    if not running:
        return []
    down_nodes = cluster_state.read_down_nodes(engine)
    hosts = cluster_state.read_host_names(engine)
    lost_hosts = sorted({down_nodes[task.node_id] for task in running if task.node_id in down_nodes})
    waiting = [f"{task.state} on {hosts.get(task.node_id, task.node_id)}" for task in running if task.node_id not in down_nodes]
    if lost_hosts and not waiting:
        report_progress(f"{', '.join(lost_hosts)} is down: its tasks are removed when it is ready again")
    return waiting


def _describe_uncleared_tasks(engine: DockerEngine, stack: str) -> list[str]:
    """Return a description of each task that Swarm has not deleted yet. Tasks on a node that is down are omitted: Swarm keeps them."""
    orphans = _list_orphaned_tasks(engine, stack)
    down_nodes = cluster_state.read_down_nodes(engine) if orphans else {}
    return [f"{task.node_name} ({task.state})" for task in orphans if task.node_id not in down_nodes]


def _list_orphaned_tasks(engine: DockerEngine, stack: str) -> list[cluster_state.Task]:
    # Services are listed second: a service created between the two requests has no task in the first list.
    tasks = cluster_state.list_tasks(engine, stack)
    service_ids = {service.id for service in cluster_state.list_services(engine, stack)} if tasks else set()
    return [task for task in tasks if task.service_id not in service_ids]


def _remove_network(engine: DockerEngine, network_id: str, name: str, report_progress: ProgressReporter) -> None:
    """Remove a network; retry while Swarm still counts a finished task among its users."""
    report_progress(f"removing network {name}")
    deadline = time.monotonic() + _NETWORK_TIMEOUT_SECONDS
    while True:
        try:
            engine.delete(f"/networks/{network_id}")
            return
        except EngineError as error:
            if error.status is None:
                raise
            if time.monotonic() > deadline:
                hint = "remove the containers or services that use it, then run the command again"
                raise StackError(f"cannot be removed: {error.message}", place=f"network {name}", hint=hint) from None
        time.sleep(_POLL_SECONDS)


def _list_remaining_objects(engine: DockerEngine, stack: str) -> list[str]:
    existing = cluster_state.read_stack_state(engine, stack)
    return [*existing.services, *existing.networks, *existing.configs, *existing.secrets]


def _wait_until_none_remain(
    subject: str, timeout: float, report_progress: ProgressReporter, list_remaining: Callable[[], list[str]]
) -> None:
    """Wait until `list_remaining` returns an empty list. Raises StackError after `timeout` seconds."""
    started_at = reported_at = time.monotonic()
    while remaining := list_remaining():
        now = time.monotonic()
        if now - started_at > timeout:
            message = f"{subject} still exist after {timeout:.0f} s: {', '.join(remaining)}"
            raise StackError(message, hint="run the command again; docker node ls shows unresponsive nodes")
        if now - reported_at > _LOG_INTERVAL_SECONDS:
            reported_at = now
            report_progress(f"waiting for {subject}: {', '.join(remaining)}")
        time.sleep(_POLL_SECONDS)
