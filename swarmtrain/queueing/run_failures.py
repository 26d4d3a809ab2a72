"""Runs that do not do what the queue asks of them: they cannot start, are killed before they have saved, or keep nodes after their end."""

from __future__ import annotations

from collections.abc import Sequence

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common import container_logs
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.launchers.swarm.convergence import find_exec_failures, find_refusals
from swarmtrain.protocol import EVENT_CHECKPOINT, EVENT_PROGRESS, RENDEZVOUS_SERVICE, Event
from swarmtrain.queueing.queue_state import QueueMember

_TAIL_LINES = 100
_NODE_EXIT_SECONDS = 30.0
"""Seconds after the exit of the coordinator in which the nodes exit, too."""


def describe_start_failure(engine: DockerEngine, member: QueueMember, now: float) -> str:
    """Return why the machines refuse to start so many nodes of an admitted run that it cannot train; empty if they do not.

    Such a run, for example one whose image cannot be pulled, would block its machines for nothing.
    """
    counts = {service.id: service.force_update for service in member.services}
    current_tasks = [task for task in member.tasks if task.force_update == counts.get(task.service_id)]
    if not any(task.state in ("rejected", "failed") for task in current_tasks):
        return ""
    try:
        hosts, seconds = cluster_state.read_host_names(engine), now - member.entry.changed
        refusals = find_refusals(engine, member.run, list(member.services), current_tasks, hosts, seconds=seconds)
        refusals = refusals or find_exec_failures(engine, member.run, member.services, current_tasks, hosts)
    except EngineError:
        return ""
    refused = {refusal.service for refusal in refusals}
    min_nodes = member.config.runner.node_range[0] if member.config else len(member.entry.machines)
    can_train = len(member.entry.machines.keys() - refused) >= min(min_nodes, len(member.entry.machines))
    if not refusals or (can_train and RENDEZVOUS_SERVICE not in refused):
        return ""
    return f"cannot be started: {refusals[0]}; {refusals[0].hint}"


def read_last_events(engine: DockerEngine, member: QueueMember) -> list[Event]:
    """Return the last events of a run, oldest first. Empty if its log cannot be read now."""
    try:
        lines = container_logs.read_log_lines(engine, member.coordinator.api_path, RENDEZVOUS_SERVICE, tail=_TAIL_LINES)
    except EngineError:
        return []
    return [event for line in lines if (event := line.parse_event())]


def count_lost_steps(events: Sequence[Event]) -> int:
    """Return how many steps a stopped run had completed after its last checkpoint: they are recomputed when it resumes.

    0 if it has saved within its grace, or if its script reports no steps.
    """
    steps = {
        kind: max(
            (int(event.data["step"]) for event in events if event.kind == kind and isinstance(event.data.get("step"), int)), default=0
        )
        for kind in (EVENT_PROGRESS, EVENT_CHECKPOINT)
    }
    return max(0, steps[EVENT_PROGRESS] - steps[EVENT_CHECKPOINT])


class EndedRunMonitor:
    """Finds nodes that run although their run has ended.

    Swarm starts a node again whose machine was lost before the node had exited. If the run has its outcome by then, the node waits for a
    coordinator that has exited, and blocks its machine. The observation starts again with each scheduler.
    """

    def __init__(self) -> None:
        self._ended_since: dict[str, float] = {}

    def list_stray_nodes(self, member: QueueMember, now: float) -> list[Service]:
        """Return the services of the nodes that still run long after the coordinator has exited."""
        running = [node for node in member.nodes if node.replicas and not cluster_state.is_service_finished(node, member.tasks)]
        if not running or not member.has_coordinator_exited:
            self._ended_since.pop(member.run, None)
            return []
        return running if now - self._ended_since.setdefault(member.run, now) >= _NODE_EXIT_SECONDS else []
