"""The scheduler as a service of the swarm: one container on a manager, with that manager's socket."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain import __version__
from swarmtrain.errors import EngineError, StackError
from swarmtrain.images.pinning import pin_image
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.convergence import is_late_network
from swarmtrain.launchers.swarm.queue.submission import LABEL_SCHEDULER_VERSION, SCHEDULER_SERVICE, find_scheduler_service
from swarmtrain.launchers.swarm.run_lock import RunLock
from swarmtrain.launchers.swarm.step_executor import update_service

SOCKET_PATH = "/var/run/docker.sock"
_LABEL_SCHEDULER = "swarmtrain.scheduler.of"
_LABEL_IMAGE = "swarmtrain.scheduler.image"
_NETWORK_NAME = SCHEDULER_SERVICE
_MODULE = "swarmtrain.queueing"
_PLACE = "the queue's scheduler"
_MEMORY_BYTES = 512 * 2**20
_NANOSECONDS = 10**9
_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.3
ApiObject = dict[str, Any]


@dataclass(frozen=True)
class SchedulerStatus:
    """Status of the scheduler's service."""

    state: str
    """State of its newest task, such as running."""
    host: str
    image: str
    version: str
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the status as a JSON-compatible dict, for `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        update = "" if self.version == __version__ else "; update it with: swarmtrain queue up"
        reason = f": {self.reason}" if self.reason else ""
        return f"the scheduler is {self.state}{where}{reason} (swarmtrain {self.version}, {self.image}){update}"


def find_scheduler_status(engine: DockerEngine) -> SchedulerStatus | None:
    """Return the status of the scheduler; None if the swarm has none. Raises EngineError."""
    return read_scheduler_status(engine) if find_scheduler_service(engine) else None


def create_scheduler_lock(engine: DockerEngine) -> RunLock:
    """Return the lock that the one active scheduler of the swarm holds."""
    return RunLock(engine, SCHEDULER_SERVICE, "schedules the queue", kind_label=_LABEL_SCHEDULER)


def start_scheduler(engine: DockerEngine, image: str, report_progress: ProgressReporter) -> SchedulerStatus:
    """Start the scheduler, or update it to `image` and this version, and wait until it runs. Raises ImageError, StackError, EngineError."""
    spec = _build_service_spec(image, pin_image(engine, image).reference)
    _create_network(engine)
    existing = find_scheduler_service(engine)
    old_tasks = {task["ID"] for task in _list_tasks(engine)} if existing else set()
    if existing is None:
        report_progress(f"starting {image} on a manager")
        engine.post("/services/create", spec, image=image)
    else:
        report_progress(f"updating to {image}")
        count = int(existing["Spec"]["TaskTemplate"].get("ForceUpdate", 0)) + 1
        spec["TaskTemplate"]["ForceUpdate"] = count
        update_service(engine, existing["ID"], existing["Version"]["Index"], spec)
    try:
        _wait_until_running(engine, old_tasks, report_progress)
    except BaseException:
        if existing is None:
            engine.delete(f"/services/{SCHEDULER_SERVICE}")
            with contextlib.suppress(EngineError):
                _remove_network(engine)
        raise
    return read_scheduler_status(engine)


def remove_scheduler(engine: DockerEngine, report_progress: ProgressReporter) -> None:
    """Remove the scheduler. Running runs continue; waiting ones wait until there is a scheduler again. Raises StackError, EngineError."""
    if find_scheduler_service(engine) is None and _find_network(engine):  # an earlier command was interrupted
        _remove_network(engine)
        return
    service = _get_service(engine)
    engine.delete(f"/services/{SCHEDULER_SERVICE}")
    report_progress("waiting for its container to stop")
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while any(task.get("ServiceID") == service["ID"] for task in engine.list_objects("/tasks")) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    _remove_network(engine)


def read_scheduler_status(engine: DockerEngine) -> SchedulerStatus:
    """Return the status of the scheduler. Raises StackError if there is none, EngineError."""
    labels = _get_service(engine)["Spec"]["Labels"]
    task = next(iter(_list_tasks(engine)), None)
    hosts = cluster_state.read_host_names(engine)
    return SchedulerStatus(
        state=str(task["Status"]["State"]) if task else "new",
        host=hosts.get(task.get("NodeID", ""), "") if task else "",
        image=str(labels.get(_LABEL_IMAGE, "")),
        version=str(labels.get(LABEL_SCHEDULER_VERSION, "")),
        reason=str(task["Status"].get("Err", "")) if task else "",
    )


def _build_service_spec(image: str, pinned_image: str) -> ApiObject:
    """Return the spec of the service. Its container can use the engine's socket; it has no capabilities, and no way out of its network."""
    container = {
        "Image": pinned_image,
        "Command": ["python3", "-m", _MODULE],
        "User": "0",  # the owner of the socket; without capabilities, that gives no other rights
        "Env": ["PYTHONDONTWRITEBYTECODE=1", "HOME=/tmp"],
        "Mounts": [
            {"Type": "bind", "Source": SOCKET_PATH, "Target": SOCKET_PATH},
            {"Type": "tmpfs", "Target": "/tmp", "TmpfsOptions": {"SizeBytes": 16 * 2**20}},  # noqa: S108  # in the container
        ],
        "CapabilityDrop": ["ALL"],
        "ReadOnly": True,
        "Init": True,
        "StopGracePeriod": 10 * _NANOSECONDS,
    }
    return {
        "Name": SCHEDULER_SERVICE,
        "Labels": {LABEL_SCHEDULER_VERSION: __version__, _LABEL_IMAGE: image},
        "TaskTemplate": {
            "ContainerSpec": container,
            "Networks": [{"Target": _NETWORK_NAME}],
            "Resources": {"Limits": {"MemoryBytes": _MEMORY_BYTES}},
            "RestartPolicy": {"Condition": "any", "Delay": 2 * _NANOSECONDS},
            "Placement": {"Constraints": ["node.role==manager"]},
            "LogDriver": {"Name": "json-file", "Options": {"max-size": "10m", "max-file": "3"}},
        },
        "Mode": {"Replicated": {"Replicas": 1}},
        "UpdateConfig": {"Parallelism": 1, "Order": "stop-first"},
        "EndpointSpec": {"Mode": "dnsrr"},
    }


def _create_network(engine: DockerEngine) -> None:
    """Create the scheduler's own network, if it does not exist. Raises EngineError.

    Without one, Swarm connects a container to the machine's default bridge, through which it reaches other containers and the outside. A
    service cannot have the network none, so this is an internal overlay with nobody else in it.
    """
    existing = _find_network(engine)
    if existing is None:
        network = {
            "Name": _NETWORK_NAME,
            "Driver": "overlay",
            "Scope": "swarm",
            "Internal": True,
            "Labels": {LABEL_SCHEDULER_VERSION: __version__},
        }
        try:
            engine.post("/networks/create", {**network, "CheckDuplicate": True})
        except EngineError as error:
            if error.status != 409:  # another command has created it meanwhile
                raise
    elif not _is_own_network(existing):
        raise StackError(
            "exists, and is not the scheduler's", place=f"network {_NETWORK_NAME}", hint=f"docker network rm {_NETWORK_NAME}, or rename it"
        )


def _remove_network(engine: DockerEngine) -> None:
    """Remove the scheduler's network, if it exists, as soon as its last container has left it. Raises EngineError."""
    network = _find_network(engine)
    if network is None or not _is_own_network(network):
        return
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        try:
            engine.delete(f"/networks/{network['Id']}")
            return
        except EngineError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def _find_network(engine: DockerEngine) -> ApiObject | None:
    # The engine's filter also matches longer names.
    networks = engine.list_objects("/networks", name=_NETWORK_NAME)
    return next((network for network in networks if network["Name"] == _NETWORK_NAME and network.get("Scope") == "swarm"), None)


def _is_own_network(network: ApiObject) -> bool:
    return LABEL_SCHEDULER_VERSION in (network.get("Labels") or {})


def _wait_until_running(engine: DockerEngine, old_tasks: set[str], report_progress: ProgressReporter) -> None:
    """Wait until a new task of the scheduler runs. Raises StackError with the reason as soon as one cannot be started."""
    deadline, last_line = time.monotonic() + _TIMEOUT_SECONDS, ""
    while time.monotonic() < deadline:
        tasks = [task for task in _list_tasks(engine) if task["ID"] not in old_tasks]
        states = [task["Status"] for task in tasks] or [{"State": "new"}]
        if any(status["State"] == "running" for status in states):
            return
        for status in states:
            if status["State"] in ("rejected", "failed", "complete") and not is_late_network(str(status.get("Err", ""))):
                raise StackError(
                    f"does not start: {status.get('Err', '')}", place=_PLACE, hint=f"docker service logs {SCHEDULER_SERVICE} shows why"
                )
        if (line := f"{states[0]['State']} {states[0].get('Err', '')}".strip()) != last_line:
            report_progress(line)
            last_line = line
        time.sleep(_POLL_SECONDS)
    raise StackError(
        f"is not running after {_TIMEOUT_SECONDS:.0f} s: {last_line}", place=_PLACE, hint=f"docker service ps {SCHEDULER_SERVICE}"
    )


def _get_service(engine: DockerEngine) -> ApiObject:
    service = find_scheduler_service(engine)
    if service is None:
        raise StackError("there is none in this swarm, so runs start at once, or not at all", place=_PLACE, hint="swarmtrain queue up")
    return service


def _list_tasks(engine: DockerEngine) -> list[ApiObject]:
    """Return the tasks of the scheduler's service, newest first."""
    return sorted(engine.list_objects("/tasks", service=SCHEDULER_SERVICE), key=lambda task: str(task["CreatedAt"]), reverse=True)
