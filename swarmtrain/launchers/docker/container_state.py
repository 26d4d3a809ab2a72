"""State of a run on a Docker engine: its containers, found by their labels, whether swarmtrain or docker compose created them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from swarmtrain.errors import EngineError
from swarmtrain.launchers.base import TaskExit, TaskState
from swarmtrain.launchers.common.docker_engine import DockerEngine, is_not_found_error
from swarmtrain.protocol import EXIT_PLANNED, LABEL_CONTAINER, LABEL_HOST, LABEL_NODE, LABEL_RUN, RENDEZVOUS_SERVICE
from swarmtrain.protocol.run_identity import RunIdentity, is_valid_run_name

FIRST_HOST = "docker0"
"""Host name shown for a run's first node; all nodes run on the engine's machine."""


@dataclass(frozen=True)
class Container:
    """A container of a run, as reported by the engine."""

    id: str
    node: str
    """Name of the run's node, or `rendezvous` for the coordinator's container."""
    spec_digest: str
    """Digest of the specification from which the container was created."""
    image: str
    labels: dict[str, str]
    state: dict[str, Any]
    """The container's state as the engine reports it."""
    created: str
    """Time of the container's creation, in Docker's format."""
    restarts: int = 0
    """How often the engine has restarted the container."""

    @property
    def api_path(self) -> str:
        """Path of the container in the engine's API."""
        return f"/containers/{self.id}"

    @property
    def is_alive(self) -> bool:
        """Whether the container is running or restarting."""
        return bool(self.state["Running"] or self.state["Restarting"])

    @property
    def has_succeeded(self) -> bool:
        """Whether the container has exited with code 0, after which it is not restarted."""
        return bool(self.state["Status"] == "exited" and self.state["ExitCode"] == 0)

    def to_task_state(self) -> TaskState:
        """Return the container's state as a TaskState."""
        status, exit_code, host = self.state["Status"], self.state["ExitCode"], self.labels.get(LABEL_HOST, FIRST_HOST)
        exits = _list_exits(self.node, self.state)
        if self.state["Restarting"]:
            return TaskState(self.node, host, "starting", f"restarting after: {_describe_exit(self.state)}", exit_code, exits=exits)
        if status == "exited":
            state = "complete" if exit_code == 0 else "shutdown" if exit_code == EXIT_PLANNED else "failed"
            return TaskState(self.node, host, state, _describe_exit(self.state) if exit_code else "", exit_code, exits=exits)
        return TaskState(self.node, host, {"created": "new"}.get(status, status))


def _list_exits(node: str, container_state: dict[str, Any]) -> tuple[TaskExit, ...]:
    """Return the last exit of a container, if nobody had requested it; the engine does not keep earlier ones."""
    code = container_state["ExitCode"]
    if container_state["Running"] or code in (0, EXIT_PLANNED):
        return ()
    return (TaskExit(node, datetime.fromisoformat(container_state["FinishedAt"]).timestamp(), code, _describe_exit(container_state)),)


def _describe_exit(container_state: dict[str, Any]) -> str:
    if container_state["OOMKilled"]:
        return "killed by the kernel's OOM killer"
    return str(container_state["Error"] or f"exit code {container_state['ExitCode']}")


def list_runs(engine: DockerEngine) -> list[str]:
    """Return the valid names of the runs that have containers, sorted. Raises EngineError."""
    names = {item["Labels"].get(LABEL_RUN, "") for item in _list_labelled_containers(engine, LABEL_CONTAINER)}
    return sorted(filter(is_valid_run_name, names))


def list_containers(engine: DockerEngine, run: str) -> dict[str, Container]:
    """Return the containers of a run by node, nodes first. Raises EngineError."""
    containers = {}
    for item in _list_labelled_containers(engine, f"{LABEL_RUN}={run}"):
        if LABEL_CONTAINER not in item["Labels"]:
            continue  # a container of another launcher
        try:
            details = engine.get(f"/containers/{item['Id']}/json")
        except EngineError as error:
            if is_not_found_error(error):
                continue
            raise
        labels = details["Config"]["Labels"]
        if node := labels.get(LABEL_NODE):
            restarts = details.get("RestartCount", 0)
            containers[node] = Container(
                details["Id"], node, labels[LABEL_CONTAINER], details["Image"], labels, details["State"], details["Created"], restarts
            )
    return dict(sorted(containers.items(), key=lambda pair: (pair[0] == RENDEZVOUS_SERVICE, len(pair[0]), pair[0])))


def find_identity(containers: Mapping[str, Container]) -> RunIdentity:
    """Return the identity of the run of `containers`, of which there is at least one."""
    labelled = [identity for container in containers.values() if (identity := RunIdentity.from_labels(container.labels))]
    first = containers.get(RENDEZVOUS_SERVICE, next(iter(containers.values())))
    return labelled[0] if labelled else RunIdentity.from_engine_object(first.id, first.created)


def _list_labelled_containers(engine: DockerEngine, label: str) -> list[dict[str, Any]]:
    containers: list[dict[str, Any]] = engine.get("/containers/json", {"all": "1", "filters": json.dumps({"label": [label]})})
    return containers
