"""Replaces a coordinator that runs, but whose name a node cannot resolve, while the run is followed.

In Docker 29.0 to 29.6 (moby#53141), the names of a machine's services may not resolve for hours after the machine lost its link, while
their addresses work. Nodes that are training use the last address that answered, but a container that starts does not know any. A new task
of the service makes its name resolve again. This forms a new world, as the joining node requires anyway: the ranks save, and no step is
lost. What the coordinator has only in memory is lost: the restart counts, and which nodes are quarantined.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.container_logs import ContainerLogLine
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.launchers.swarm.following.state_poller import SwarmSnapshot
from swarmtrain.protocol import RENDEZVOUS_SERVICE, UNRESOLVED_COORDINATOR_TEXT

# Names may resolve seconds after a task has started; and lines that a node wrote before do not count.
_SETTLING_SECONDS = 20.0
_MIN_INTERVAL_SECONDS = 300.0
# With another name, such as that of a host, a new task would not help.
_REPORT = f"{UNRESOLVED_COORDINATOR_TEXT} {RENDEZVOUS_SERVICE} "


class CoordinatorRepair:
    """Repair of the coordinator of one followed run. It replaces the coordinator at most once in 5 min."""

    def __init__(self, engine: DockerEngine, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._run, self._clock = engine, run, clock
        self._service: Service | None = None
        self._running_task_id = ""
        self._running_since = self._repaired_at = float("-inf")

    def observe_snapshot(self, snapshot: SwarmSnapshot) -> None:
        """Record which task of the coordinator runs, and since when."""
        self._service = cluster_state.find_coordinator(snapshot.services, self._run)
        task = cluster_state.find_newest_task(snapshot.tasks, self._service.id) if self._service else None
        task_id = task.id if task and task.state == "running" else ""
        if task_id != self._running_task_id:
            self._running_task_id, self._running_since = task_id, self._clock()

    def handle_line(self, line: ContainerLogLine) -> str:
        """Replace the coordinator if `line` reports that its name does not resolve; return a message about it, or an empty string."""
        if not line.text.startswith(_REPORT) or not self._is_due() or self._service is None:
            return ""
        self._repaired_at = self._clock()
        command = f"docker service update --force {self._service.name}"
        try:
            self._replace_task(self._service)
        except EngineError as error:
            return f"{line.node} cannot resolve the name of the coordinator, which runs; replace it with: {command} ({error.message})"
        return f"{line.node} cannot resolve the name of the coordinator, which runs: it is replaced, as by {command}"

    def _is_due(self) -> bool:
        now = self._clock()
        is_settled = bool(self._running_task_id) and now - self._running_since >= _SETTLING_SECONDS
        return is_settled and now - self._repaired_at >= _MIN_INTERVAL_SECONDS

    def _replace_task(self, service: Service) -> None:
        """Increment ForceUpdate, without a retry: if the service has changed since the snapshot, somebody else has replaced its task."""
        task = service.spec["TaskTemplate"]
        spec = {**service.spec, "TaskTemplate": {**task, "ForceUpdate": int(task.get("ForceUpdate", 0)) + 1}}
        params = {"version": str(service.version), "registryAuthFrom": "spec"}
        self._engine.post(f"{service.api_path}/update", spec, params, image=task["ContainerSpec"]["Image"])
