"""A registry inside the swarm, for users without one: a service on one node that stores its images in a volume there.

It serves plain HTTP, since it has no certificate: every engine must list it as an insecure registry, and anyone who can read the traffic
between the machines can read its password.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import EngineError, ImageError
from swarmtrain.images.image_client import ProgressReporter
from swarmtrain.images.pinning import pin_image
from swarmtrain.images.registry_access import (
    DELETES_LABEL,
    HTPASSWD_LABEL,
    SALT_LABEL,
    USER_LABEL,
    RegistryAccess,
    build_secret_mount,
)
from swarmtrain.images.swarm_nodes import ManagerEngine, get_engine_node_id, get_host_name
from swarmtrain.images.swarm_nodes import get_node_address as address_of

SERVICE_NAME = "swarmtrain-registry"
"""Name of the registry's service, and of the volume that stores its images."""
DEFAULT_IMAGE = "registry:2.8.3"
DEFAULT_PORT = 5000
_LOCATION = f"service {SERVICE_NAME}"
_CONTAINER_PORT = 5000
_VOLUME_TARGET = "/var/lib/registry"
_MEMORY_LIMIT_BYTES = 2**30
_NANOSECONDS = 10**9
_TIMEOUT_SECONDS = 120.0  # seconds to pull the registry's image and start its container
_LISTEN_SECONDS = 15.0  # seconds until the registry accepts connections, after its container has started
_PORT_IN_USE_TEXTS = ("already in use", "already allocated", "host-mode port")
_RECREATE_HINT = f"swarmtrain image registry down, then up again; its images stay in the volume {SERVICE_NAME}"


@dataclass(frozen=True)
class RegistryStatus:
    """Status of the swarm's registry. Names of images in it begin with `address`."""

    address: str
    host: str
    image: str
    state: str
    reason: str
    trust_problem: str
    """Why the queried engine cannot use the registry; empty if it can."""
    insecure_registries: tuple[str, ...]
    """The complete list of `insecure-registries` that the daemon.json of the queried engine should have."""
    user: str
    """The user of its login; empty if it has none."""
    allows_deletes: bool

    @property
    def daemon_json_line(self) -> str:
        """The line for the daemon.json of every engine, which allows the engine to pull from the registry without TLS."""
        return f'"insecure-registries": {json.dumps(list(self.insecure_registries))}'

    def to_dict(self) -> dict[str, object]:
        """Return the status as a JSON-compatible dict, for `--json`."""
        return {
            "address": self.address,
            "host": self.host,
            "image": self.image,
            "state": self.state,
            "reason": self.reason,
            "trust": self.trust_problem,
            "user": self.user,
            "allows_deletes": self.allows_deletes,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.address} on {self.host}, {self.image}, {self.state}" + (f": {self.reason}" if self.reason else ""),
            f"this engine cannot use the registry yet: {self.trust_problem}" if self.trust_problem else "this engine can use the registry",
            f"every engine needs this in its /etc/docker/daemon.json: {self.daemon_json_line}",
            f"it requires the login of user {self.user}"
            if self.user
            else "it requires no login: anyone who reaches it can replace images, which the next deploy then runs on every node",
        ]
        return "\n".join(lines)


def start_registry(
    engine: ManagerEngine,
    *,
    node: str | None = None,
    port: int = DEFAULT_PORT,
    image: str = DEFAULT_IMAGE,
    access: RegistryAccess,
    report_progress: ProgressReporter,
) -> RegistryStatus:
    """Start the registry on `node` (default: the engine's own node) and wait until it runs.

    If it already runs, it is kept, except that its container is replaced if `access` differs (`list_access_changes`). Returns its status.
    Raises ImageError if it runs on another node or port or with another image, or cannot run, EngineError if the engine rejects a request.
    """
    manager_node = _find_node(engine, node)
    desired_spec = _build_service_spec(manager_node["ID"], port, image)
    existing_service = _find_service(engine)
    if existing_service:
        _check_node_port_and_image(existing_service["Spec"], desired_spec)
    is_kept = existing_service is not None and not list_access_changes(engine, access)
    if is_kept:
        report_progress("it is already running")
    else:
        _add_access(engine, desired_spec, access, existing_service)
        if existing_service:
            _remove_service(engine, existing_service, report_progress)
        desired_spec["TaskTemplate"]["ContainerSpec"]["Image"] = _pin_image_or_warn(engine, image, report_progress)
        report_progress(f"starting {image} on {get_host_name(manager_node)}, port {port}")
        engine.post("/services/create", desired_spec, image=image)
    try:
        _wait_until_registry_running(engine, get_host_name(manager_node), port, report_progress)
        _wait_until_registry_listens(engine, get_host_name(manager_node), f"{address_of(manager_node)}:{port}")
    except BaseException:
        if not is_kept:
            _remove_after_failure(engine, report_progress)
        raise
    _remove_unused_secrets(engine, _get_secret_name(_get_service(engine)["Spec"]))
    return get_registry_status(engine)


def list_access_changes(engine: ManagerEngine, access: RegistryAccess) -> list[str]:
    """Return how `access` differs from that of the running registry; empty if it does not, or none runs. Raises EngineError."""
    service = _find_service(engine)
    return access.describe_changes(service["Spec"]["Labels"], _get_secret_name(service["Spec"])) if service else []


def find_login_user(engine: ManagerEngine) -> str:
    """Return the user of the running registry's login; empty if it has none, or none runs. Raises EngineError."""
    service = _find_service(engine)
    return str(service["Spec"]["Labels"].get(USER_LABEL, "")) if service else ""


def get_registry_address(engine: ManagerEngine, *, node: str | None, port: int) -> str:
    """Return the address that a registry on `node` has, with which names of its images begin. Raises ImageError for an unknown node."""
    return f"{address_of(_find_node(engine, node))}:{port}"


def remove_registry(engine: ManagerEngine, *, remove_images: bool, report_progress: ProgressReporter) -> None:
    """Remove the registry and wait until its container is removed; with `remove_images`, also remove its images.

    Raises ImageError if there is no registry, or if `remove_images` is set and the volume is on another node; EngineError if the engine
    rejects a request.
    """
    service = _get_service(engine)
    node = _get_placement_constraints(service["Spec"])[0].partition("==")[2]
    if remove_images and node != get_engine_node_id(engine):
        node_host = get_host_name(engine.get(f"/nodes/{node}"))
        raise ImageError(
            f"its images are in a volume on another node, {node_host}",
            place=_LOCATION,
            hint=f"run swarmtrain image registry down, then docker volume rm {SERVICE_NAME} on {node_host}",
        )
    _remove_service(engine, service, report_progress)
    _remove_unused_secrets(engine, "")
    if remove_images:
        _remove_volume(engine, time.monotonic() + _TIMEOUT_SECONDS)


def get_registry_status(engine: ManagerEngine) -> RegistryStatus:
    """Return the status of the registry. Raises ImageError if there is none, EngineError if the engine rejects a request."""
    service = _get_service(engine)
    labels = service["Spec"]["Labels"]
    node = engine.get(f"/nodes/{_get_placement_constraints(service['Spec'])[0].partition('==')[2]}")
    address = f"{address_of(node)}:{labels['swarmtrain.registry.port']}"
    newest_status = next((task["Status"] for task in _list_tasks(engine)), {"State": "new"})
    indexes = engine.get("/info").get("RegistryConfig", {}).get("IndexConfigs") or {}
    insecure_names = {name for name, entry in indexes.items() if not entry.get("Secure", True)}
    return RegistryStatus(
        address=address,
        host=get_host_name(node),
        image=labels["swarmtrain.registry.image"],
        state=str(newest_status["State"]),
        reason=str(newest_status.get("Err", "")),
        trust_problem=_find_trust_problem(engine, address) if newest_status["State"] == "running" else "it does not run",
        insecure_registries=tuple(sorted({*insecure_names, address})),
        user=labels.get(USER_LABEL, ""),
        allows_deletes=labels.get(DELETES_LABEL, "true") == "true",
    )


def _build_service_spec(node_id: str, port: int, image: str) -> dict[str, Any]:
    mount = {"Type": "volume", "Source": SERVICE_NAME, "Target": _VOLUME_TARGET}
    published = {"Protocol": "tcp", "TargetPort": _CONTAINER_PORT, "PublishedPort": port, "PublishMode": "host"}
    return {
        "Name": SERVICE_NAME,
        "Labels": {"swarmtrain.registry.port": str(port), "swarmtrain.registry.image": image},
        "TaskTemplate": {
            "ContainerSpec": {"Image": image, "Mounts": [mount]},
            "Resources": {"Limits": {"MemoryBytes": _MEMORY_LIMIT_BYTES}},
            "RestartPolicy": {"Condition": "any", "Delay": 5 * _NANOSECONDS},
            "Placement": {"Constraints": [f"node.id=={node_id}"]},
        },
        "Mode": {"Replicated": {"Replicas": 1}},
        "UpdateConfig": {"Parallelism": 1, "Order": "stop-first"},
        "EndpointSpec": {"Mode": "dnsrr", "Ports": [published]},
    }


def _check_node_port_and_image(spec: Mapping[str, Any], desired_spec: Mapping[str, Any]) -> None:
    labels = {name: spec["Labels"].get(name) for name in desired_spec["Labels"]}
    if (labels, _get_placement_constraints(spec)) != (desired_spec["Labels"], _get_placement_constraints(desired_spec)):
        raise ImageError("the registry is already running with a different node, port or image", place=_LOCATION, hint=_RECREATE_HINT)


def _add_access(
    engine: ManagerEngine, desired_spec: dict[str, Any], access: RegistryAccess, existing_service: Mapping[str, Any] | None
) -> None:
    """Add the settings of `access` to a spec, and create the secret with its login; without a new password, refer to the existing one."""
    labels, container = desired_spec["Labels"], desired_spec["TaskTemplate"]["ContainerSpec"]
    old_spec = existing_service["Spec"] if existing_service else {"Labels": {}}
    labels[DELETES_LABEL] = str(access.allow_deletes).lower()
    container["Env"] = access.environment
    if not access.user:
        return
    labels[USER_LABEL] = access.user
    if access.password:
        htpasswd = access.build_htpasswd(old_spec["Labels"])
        labels[SALT_LABEL] = htpasswd.salt
        container["Secrets"] = [_create_htpasswd_secret(engine, f"{SERVICE_NAME}-htpasswd-{htpasswd.digest}", htpasswd.content)]
    else:
        labels[SALT_LABEL] = old_spec["Labels"][SALT_LABEL]
        container["Secrets"] = old_spec["TaskTemplate"]["ContainerSpec"]["Secrets"]


def _create_htpasswd_secret(engine: ManagerEngine, name: str, content: bytes) -> dict[str, object]:
    """Create the secret, unless it exists, and return the entry in a service's spec that mounts it."""
    existing_ids = {item["Spec"]["Name"]: item["ID"] for item in engine.list_objects("/secrets", label=HTPASSWD_LABEL)}
    if name not in existing_ids:
        spec = {"Name": name, "Labels": {HTPASSWD_LABEL: ""}, "Data": base64.b64encode(content).decode()}
        existing_ids[name] = engine.post("/secrets/create", spec)["ID"]
    return build_secret_mount(existing_ids[name], name)


def _get_secret_name(spec: Mapping[str, Any]) -> str:
    """Return the name of the secret with the registry's login; empty if it has none."""
    return next((str(item["SecretName"]) for item in spec["TaskTemplate"]["ContainerSpec"].get("Secrets") or []), "")


def _remove_unused_secrets(engine: ManagerEngine, used_name: str) -> None:
    for item in engine.list_objects("/secrets", label=HTPASSWD_LABEL):
        if item["Spec"]["Name"] != used_name:
            engine.delete(f"/secrets/{item['ID']}")


def _remove_service(engine: ManagerEngine, service: Mapping[str, Any], report_progress: ProgressReporter) -> None:
    """Remove the registry's service, and wait until its container has stopped."""
    engine.delete(f"/services/{SERVICE_NAME}")
    report_progress("waiting for its container to stop")
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while [task for task in engine.list_objects("/tasks") if task.get("ServiceID") == service["ID"]] and time.monotonic() < deadline:
        time.sleep(0.2)


def _remove_after_failure(engine: ManagerEngine, report_progress: ProgressReporter) -> None:
    """Remove the service, since the next attempt needs its port. An error is reported only, as the one before it says what to do."""
    try:
        _remove_service(engine, _get_service(engine), report_progress)
    except (EngineError, ImageError) as error:
        report_progress(f"not removed: {error.message}; run swarmtrain image registry down")


def _pin_image_or_warn(engine: ManagerEngine, image: str, report_progress: ProgressReporter) -> str:
    try:
        return pin_image(engine, image).reference
    except ImageError as error:
        report_progress(f"{image} is not pinned, so the node must already have it: {error.message}")
        return image


def _wait_until_registry_running(engine: ManagerEngine, node_host: str, port: int, report_progress: ProgressReporter) -> None:
    """Wait until the registry's task runs. Raises ImageError with the reason as soon as it cannot run."""
    deadline, last_line = time.monotonic() + _TIMEOUT_SECONDS, ""
    while time.monotonic() < deadline:
        # Swarm replaces a container that fails to start, so any of the tasks may have the reason.
        tasks = [task["Status"] for task in _list_tasks(engine)] or [{"State": "new"}]
        if any(task["State"] == "running" for task in tasks):
            return
        for task in tasks:
            _raise_if_task_failed(task["State"], task.get("Err", ""), node_host, port)
        state, error_text = tasks[0]["State"], tasks[0].get("Err", "")
        if (line := f"{state} {error_text}".strip()) != last_line:
            report_progress(line)
            last_line = line
        time.sleep(0.2)
    raise ImageError(
        f"is not running on {node_host} after {_TIMEOUT_SECONDS:.0f} s: {last_line}",
        place=_LOCATION,
        hint=f"docker service ps {SERVICE_NAME}",
    )


def _wait_until_registry_listens(engine: ManagerEngine, node_host: str, registry_address: str) -> None:
    """Wait until the registry, whose container runs, accepts connections. What else prevents its use is in its status.

    Raises ImageError if it does not accept any.
    """
    deadline = time.monotonic() + _LISTEN_SECONDS
    while "connection refused" in _find_trust_problem(engine, registry_address):
        if time.monotonic() > deadline:
            raise ImageError(
                f"its container runs on {node_host}, but accepts no connections to {registry_address} after {_LISTEN_SECONDS:.0f} s",
                place=_LOCATION,
                hint=f"use --image with the image of a registry that listens on port {_CONTAINER_PORT}, as {DEFAULT_IMAGE} does",
            )
        time.sleep(0.2)


def _raise_if_task_failed(state: str, error_text: str, node_host: str, port: int) -> None:
    if any(words in error_text for words in _PORT_IN_USE_TEXTS):
        hint = f"swarmtrain image registry up --port {port + 1}"
        raise ImageError(f"another process uses port {port} of {node_host}: {error_text}", place=_LOCATION, hint=hint)
    if state in ("rejected", "failed", "complete"):
        hint = "use --image with an image that the node has or can pull" if state == "rejected" else f"docker service logs {SERVICE_NAME}"
        raise ImageError(f"does not start on {node_host}: {error_text}", place=_LOCATION, hint=hint)


def _find_trust_problem(engine: ManagerEngine, registry_address: str) -> str:
    """Return why the engine cannot use the registry at `registry_address`; empty if it can. Queries an image that does not exist."""
    try:
        engine.inspect_distribution(f"{registry_address}/none:none")
    except EngineError as error:
        if any(words in error.message.lower() for words in ("unauthorized", "no basic auth credentials")):
            return f"log in with: docker login {registry_address}"
        if any(words in error.message.lower() for words in ("unknown", "not found", "denied")):
            return ""
        if "HTTP response to HTTPS client" in error.message:
            return "it is not listed in the engine's insecure-registries"
        return error.message
    return ""


def _remove_volume(engine: ManagerEngine, deadline: float) -> None:
    while True:
        try:
            engine.delete(f"/volumes/{SERVICE_NAME}")
        except EngineError as error:
            if error.status != 409 or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return


def _find_service(engine: ManagerEngine) -> dict[str, Any] | None:
    return next(
        (service for service in engine.list_objects("/services", name=SERVICE_NAME) if service["Spec"]["Name"] == SERVICE_NAME), None
    )


def _get_service(engine: ManagerEngine) -> dict[str, Any]:
    service = _find_service(engine)
    if service is None or "swarmtrain.registry.port" not in service["Spec"].get("Labels", {}):
        raise ImageError("there is no registry in this swarm", place=_LOCATION, hint="run swarmtrain image registry up to start one")
    return service


def _list_tasks(engine: ManagerEngine) -> list[dict[str, Any]]:
    """Return the tasks of the registry's service, newest first."""
    return sorted(engine.list_objects("/tasks", service=SERVICE_NAME), key=lambda task: str(task["CreatedAt"]), reverse=True)


def _find_node(engine: ManagerEngine, name: str | None) -> dict[str, Any]:
    nodes = engine.list_objects("/nodes")
    node_name = name or get_engine_node_id(engine)
    for node in nodes:
        if node_name in (node["ID"], get_host_name(node)):
            return node
    known_hosts = ", ".join(sorted(get_host_name(node) for node in nodes))
    raise ImageError(
        f"unknown node; available nodes: {known_hosts}", place=f"node {node_name}", hint="run docker node ls to list the nodes"
    )


def _get_placement_constraints(spec: Mapping[str, Any]) -> list[str]:
    constraints: list[str] = spec["TaskTemplate"]["Placement"]["Constraints"]
    return constraints
