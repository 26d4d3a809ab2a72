"""Wait until a stack runs, report tasks that do not run yet, and fail if a service cannot be started.

A task that no node can run at the moment is reported and stays pending: a node may become available. If a node repeatedly rejects a task
(no such image, no such folder), the deploy fails, unless enough other nodes are left.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from swarmtrain.errors import NodesRefused
from swarmtrain.launchers.base import ProgressReporter, TaskState
from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.container_logs import EXEC_HINT, MAX_EXEC_FAILURES, read_exec_failure
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.engine_values import parse_count, parse_environment
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service, Task
from swarmtrain.launchers.swarm.task_states import build_task_state
from swarmtrain.launchers.swarm.timeouts import SwarmTimeouts
from swarmtrain.launchers.task_words import format_task_state
from swarmtrain.protocol import ENV_PREFIX, RENDEZVOUS_SERVICE

_POLL_SECONDS = 0.5
_REMINDER_SECONDS = 15.0
_START_TIMEOUT_SECONDS = 1800.0
# Messages of a node that cannot start a container, each with the number of such failures after which the deploy fails, and a hint.
_NO_FOLDER_HINT = "create the folder on every node, or mount a shared file system there"
_NO_PROGRAM_HINT = "use an image that contains python3 and swarmtrain; swarmtrain image build creates one from any base image"
_NO_ADDRESS_HINT = "the addresses of the run's network may be exhausted: set runner.swarm.subnet to a larger one"
_START_FAILURES = (
    ("bind source path does not exist", 2, _NO_FOLDER_HINT),
    ("source path not found", 2, _NO_FOLDER_HINT),
    ("No such image: sha256:", 2, "copy the image to the nodes that lack it with: swarmtrain image distribute IMAGE"),
    (
        "No such image",
        2,
        "run docker pull IMAGE on that node to see why; add a registry without TLS to its engine's insecure-registries; if the registry "
        "requires a login, run docker login here, and deploy again",
    ),
    ("executable file not found", 2, _NO_PROGRAM_HINT),
    ("non-zero exit (127)", 2, _NO_PROGRAM_HINT),
    ("non-zero exit (126)", 2, _NO_PROGRAM_HINT),
    ("missing network attachments", 5, _NO_ADDRESS_HINT),
    ("load balancer IP", 5, _NO_ADDRESS_HINT),
)
_LATE_NETWORK_MESSAGES = ("missing network attachments", "load balancer IP")
_NETWORK_SECONDS = 90.0
"""Seconds for which these messages may only mean that a new network reaches a busy machine late. Swarm then starts another task. It keeps
five tasks of a service, so their number alone does not show for how long they have failed."""
_OTHER_START_FAILURE = (5, "list all attempts with docker service ps SERVICE, and the events of the node's engine with docker events")
# This message is from managers, not from a node: engines before 25.0.3 report it for every task that reserves GPUs when its node changes
# in any way, for example when it joins a network, and then restart the task. If the constraints are really not met, the next task finds
# no node and stays pending.
_CONSTRAINTS_NOT_MET = "assigned node no longer meets constraints"
# Failures of the coordinator itself do not count against the restart budget.
_COORDINATOR_FAILURE = (3, "see its log for the reason; if the image lacks swarmtrain, build one with swarmtrain image build")
_EXEC_FAILURE_SECONDS = 600.0
# Seconds without a change after which tasks count as stable: after a start, and for a coordinator that has already failed.
_STEADY_SECONDS = 0.8
_STEADY_AFTER_FAILURE_SECONDS = 3.0
_FINAL_LINES = 5


@dataclass(frozen=True)
class StartupTolerance:
    """The nodes without which a stack counts as running."""

    missing_nodes: frozenset[str] = frozenset()
    """Names of nodes whose machines are missing: Swarm starts them later."""
    max_refused_nodes: int = 0
    """Number of other nodes that their machines may refuse to start. Swarm keeps retrying them."""


NO_TOLERANCE = StartupTolerance()
"""All nodes must start."""


@dataclass(frozen=True)
class Refusal:
    """Why a service cannot be started on its machine, and how to fix it."""

    service: str
    host: str
    reason: str
    hint: str

    def __str__(self) -> str:
        return f"{self.service} on {self.host or 'no host'}: {self.reason}"


@dataclass
class _StartupProgress:
    """Progress of a startup: the messages that were already reported, and the time at which the state last changed."""

    reported_lines: dict[str, str] = field(default_factory=dict)
    refused: dict[str, Refusal] = field(default_factory=dict)
    """The refusals so far. A machine that refuses a node is not seen to refuse it at each moment: it tries again and again."""
    started_at: float = field(default_factory=time.monotonic)
    changed_at: float = field(default_factory=time.monotonic)
    reminded_at: float = field(default_factory=time.monotonic)


def list_task_ids(engine: DockerEngine, stack: str) -> frozenset[str]:
    """Return the ids of the existing tasks of `stack`. Called before a deploy, so that failures of earlier tasks are ignored."""
    return frozenset(task.id for task in cluster_state.list_tasks(engine, stack))


def wait_until_services_running(
    engine: DockerEngine,
    stack: str,
    old_task_ids: frozenset[str],
    restarted_service_ids: frozenset[str],
    *,
    report_progress: ProgressReporter,
    check_ownership: Callable[[], None],
    timeouts: SwarmTimeouts,
    tolerance: StartupTolerance = NO_TOLERANCE,
) -> None:
    """Wait until every service of `stack` runs, is complete, or waits for a node that is not available.

    Nodes that `tolerance` allows to be missing or refused are not waited for; a refused one is reported.

    `old_task_ids` are the ids of tasks from before the deploy; Swarm creates a new task for each service in `restarted_service_ids`.
    `check_ownership` is called on each poll, and raises if another command has changed the stack.

    Raises NodesRefused, with the machine's reason, for a service that cannot be started.
    """
    progress = _StartupProgress()
    hosts = cluster_state.read_host_names(engine)
    while True:
        check_ownership()
        services = cluster_state.list_services(engine, stack)
        tasks = cluster_state.list_tasks(engine, stack)
        new_tasks = [task for task in tasks if task.id not in old_task_ids]
        seconds = time.monotonic() - progress.started_at
        refusals = find_refusals(engine, stack, services, new_tasks, hosts, seconds=seconds)
        attempts = [task for task in new_tasks if task.state != "running"]
        refusals += find_exec_failures(engine, stack, services, attempts, hosts)
        _report_refusals(refusals, stack, tolerance, progress, report_progress)
        # Until Swarm has created the new task, the newest one is the old one, whose state is irrelevant.
        stale_ids = {task.id for task in tasks if task.id in old_task_ids and task.service_id in restarted_service_ids}
        tasks = [task for task in tasks if task.id not in stale_ids]
        expected = [
            service for service in services if service.get_short_name(stack) not in tolerance.missing_nodes | progress.refused.keys()
        ]
        unavailable_hosts = cluster_state.read_unavailable_hosts(engine, tasks)
        states = [build_task_state(service.get_short_name(stack), tasks, service, hosts, unavailable_hosts) for service in expected]
        _report_state_changes(
            states,
            {service.get_short_name(stack) for service in services if _is_service_unchanged(service, tasks, old_task_ids)},
            progress,
            report_progress,
        )
        failing = {refusal.service for refusal in find_exec_failures(engine, stack, services, attempts, hosts, attempts=2)}
        waiting = [state for state in states if state.node in failing or not _has_converged(state)]
        if not waiting and _has_stable_tasks(stack, services, new_tasks, progress):
            return
        if waiting and _should_stop_waiting(waiting, progress, report_progress, timeouts):
            return
        time.sleep(_POLL_SECONDS)


def _has_converged(state: TaskState) -> bool:
    if state.state in ("running", "complete", "stopped"):
        return True
    # If a container ran and then failed, the deploy continues: the coordinator counts this failure against the restart budget.
    return (
        state.node != RENDEZVOUS_SERVICE
        and "task: non-zero exit" in state.reason
        and not any(code in state.reason for code in ("(126)", "(127)"))
    )


def _has_stable_tasks(stack: str, services: list[Service], new_tasks: list[Task], progress: _StartupProgress) -> bool:
    """Return whether the started tasks have run long enough to rule out containers that fail immediately."""
    coordinator = cluster_state.find_coordinator(services, stack)
    has_coordinator_failed = coordinator is not None and any(
        task.service_id == coordinator.id and task.state == "failed" for task in new_tasks
    )
    return not new_tasks or time.monotonic() - progress.changed_at > (
        _STEADY_AFTER_FAILURE_SECONDS if has_coordinator_failed else _STEADY_SECONDS
    )


def _is_service_unchanged(service: Service, tasks: list[Task], old_task_ids: frozenset[str]) -> bool:
    task = cluster_state.find_newest_task(tasks, service.id)
    return task is not None and task.id in old_task_ids and task.state in ("running", "complete")


def _report_state_changes(
    states: list[TaskState], unchanged_nodes: set[str], progress: _StartupProgress, report_progress: ProgressReporter
) -> None:
    for state in states:
        if state.node in unchanged_nodes:
            continue
        line = format_task_state(state)
        if progress.reported_lines.get(state.node) != line:
            progress.reported_lines[state.node] = line
            progress.changed_at = progress.reminded_at = time.monotonic()
            report_progress(line)


def _should_stop_waiting(
    waiting_states: list[TaskState], progress: _StartupProgress, report_progress: ProgressReporter, timeouts: SwarmTimeouts
) -> bool:
    now = time.monotonic()
    names = "; ".join(format_task_state(state) for state in waiting_states)
    all_pending = all(state.state in ("new", "allocated", "pending") for state in waiting_states)
    if (all_pending and now - progress.changed_at > timeouts.pending_seconds) or now - progress.started_at > _START_TIMEOUT_SECONDS:
        report_progress(f"no longer waiting for: {names}")
        return True
    if now - progress.reminded_at > _REMINDER_SECONDS:
        progress.reminded_at = now
        report_progress(f"still waiting for: {names}")
    return False


def _report_refusals(
    refusals: list[Refusal], stack: str, tolerance: StartupTolerance, progress: _StartupProgress, report_progress: ProgressReporter
) -> None:
    """Report each new refusal. Raises NodesRefused if the coordinator is refused, or more nodes than `tolerance` allows."""
    new_refusals = [refusal for refusal in refusals if refusal.service not in progress.refused]
    progress.refused |= {refusal.service: refusal for refusal in new_refusals}
    refused = progress.refused.keys()
    if new_refusals and (RENDEZVOUS_SERVICE in refused or len(refused - tolerance.missing_nodes) > tolerance.max_refused_nodes):
        refusals = list(progress.refused.values())
        raise NodesRefused(
            f"cannot be started: {'; '.join(map(str, refusals))}",
            place=f"run {stack}",
            hint=refusals[0].hint,
            reasons={refusal.host: (refusal.reason, refusal.hint) for refusal in refusals if refusal.service != RENDEZVOUS_SERVICE},
        )
    for refusal in new_refusals:
        report_progress(f"{refusal}; the run starts without it, and Swarm keeps retrying. To fix it: {refusal.hint}")


def find_refusals(
    engine: DockerEngine,
    stack: str,
    services: list[Service],
    new_tasks: list[Task],
    host_name_by_node_id: dict[str, str],
    *,
    seconds: float,
) -> list[Refusal]:
    """Return the services whose tasks failed to start so often that waiting is of no use, `seconds` after the start was requested."""
    refusals = []
    for service in services:
        name = service.get_short_name(stack)
        failed_tasks = [
            task
            for task in new_tasks
            if task.service_id == service.id and _is_start_failure(task, is_coordinator=name == RENDEZVOUS_SERVICE)
        ]
        if not failed_tasks:
            continue
        reason = failed_tasks[-1].reason
        if seconds < _NETWORK_SECONDS and is_late_network(reason):
            continue
        default = _COORDINATOR_FAILURE if name == RENDEZVOUS_SERVICE and failed_tasks[-1].state == "failed" else _OTHER_START_FAILURE
        limit, hint = next(
            ((limit, hint) for final_lines, limit, hint in _START_FAILURES if final_lines.lower() in reason.lower()), default
        )
        if len(failed_tasks) >= limit:
            final_lines = _read_last_log_lines(engine, service, name) if failed_tasks[-1].state == "failed" else ""
            host = host_name_by_node_id.get(failed_tasks[-1].node_id, "")
            refusals.append(Refusal(name, host, f"{reason}{final_lines}", hint))
    return refusals


def find_exec_failures(
    engine: DockerEngine,
    stack: str,
    services: Sequence[Service],
    tasks: Sequence[Task],
    host_name_by_node_id: Mapping[str, str],
    *,
    attempts: int = MAX_EXEC_FAILURES,
) -> list[Refusal]:
    """Return the nodes that were started at least `attempts` times within 10 min, and never because their program cannot be started.

    A node that runs, or has printed anything else since, has started its agent, and is not among them. `tasks` are ordered by creation.
    """
    refusals = []
    for service in services:
        own_tasks = [task for task in tasks if task.service_id == service.id][-attempts:]
        failed = [task for task in own_tasks if _is_container_failure(task)]
        # Swarm keeps four failed tasks in addition to the one that it starts next.
        is_last = bool(own_tasks) and own_tasks[-1].state != "running" and len(failed) >= len(own_tasks) - 1
        if not service.is_node or not failed or not is_last or len(own_tasks) < attempts:
            continue
        started, ended = (datetime.fromisoformat(task.created_at).timestamp() for task in (failed[0], failed[-1]))
        if ended - started > _EXEC_FAILURE_SECONDS:
            continue
        name = service.get_short_name(stack)
        if reason := read_exec_failure(engine, service.api_path, name, len(failed)):
            refusals.append(Refusal(name, host_name_by_node_id.get(failed[-1].node_id, ""), reason, EXEC_HINT))
    return refusals


def read_min_nodes(services: Sequence[Service], stack: str) -> int:
    """Return with how many nodes the run of `services` can train; 1 if that is unknown."""
    coordinator = cluster_state.find_coordinator(list(services), stack)
    container = (coordinator.spec["TaskTemplate"].get("ContainerSpec") or {}) if coordinator else {}
    return parse_count(parse_environment(container.get("Env")).get(f"{ENV_PREFIX}MIN_NODES"), default=1)


def _is_container_failure(task: Task) -> bool:
    return task.state == "failed" and "non-zero exit" in task.reason


def is_late_network(reason: str) -> bool:
    """Return whether a node may have rejected a task only because a new network has not reached it yet."""
    return any(message in reason for message in _LATE_NETWORK_MESSAGES)


def _is_start_failure(task: Task, *, is_coordinator: bool) -> bool:
    """Return whether the task failed because its container could not be started.

    For the coordinator's own task, also return True if its container started and then failed.
    """
    if task.state == "failed":
        return is_coordinator or task.exit_code in (126, 127) or task.reason.startswith("starting container failed")
    return task.state == "rejected" and _CONSTRAINTS_NOT_MET not in task.reason


def _read_last_log_lines(engine: DockerEngine, service: Service, node_name: str) -> str:
    lines = [
        line.text
        for line in container_logs.read_log_lines(engine, service.api_path, node_name, tail=_FINAL_LINES)
        if line.parse_event() is None
    ]
    # Lines that differ only in numbers count as repeats.
    return "".join(f"\n  {line}" for line in {re.sub(r"\d+", "", line): line for line in lines}.values())
