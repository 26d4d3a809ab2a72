"""Runs that have ended, and still have nodes."""

from __future__ import annotations

from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.queueing.queue_state import QueueMember

_EXIT_SECONDS = 30.0
"""Seconds after the exit of the coordinator in which the nodes exit, too."""


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
        return running if now - self._ended_since.setdefault(member.run, now) >= _EXIT_SECONDS else []
