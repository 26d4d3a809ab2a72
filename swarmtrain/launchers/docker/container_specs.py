"""Convert a Compose file to requests to the engine: a network, and for each service the container that `docker compose` would create."""

from __future__ import annotations

from typing import Any

from swarmtrain.launchers.swarm.service_specs import build_mount, build_ulimit, normalize_capability, parse_duration_ns
from swarmtrain.protocol import ENV_RUN_ID
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.render.stack_document import NETWORK_NAME, Stack

RequestBody = dict[str, Any]

_SECRETS_FOLDER = "/run/secrets"


def build_network_request_body(stack: Stack) -> RequestBody:
    """Return the request body of the run's network."""
    network = stack.document["networks"][NETWORK_NAME]
    return {"Name": network["name"], "Driver": network["driver"], "Internal": network.get("internal", False), "Labels": network["labels"]}


def build_container_request_body(stack: Stack, service_name: str, image: str, identity: RunIdentity | None = None) -> RequestBody:
    """Return the request body of the container of `service_name`, with the image id `image`. Raises StackError.

    `identity`: identity of the run; None if the run has none, because `docker compose` started it.
    """
    service, network_name = stack.document["services"][service_name], build_network_request_body(stack)["Name"]
    environment = service["environment"] | ({ENV_RUN_ID: identity.id} if identity and ENV_RUN_ID in service["environment"] else {})
    host_config = {
        "Init": service["init"],
        "RestartPolicy": {"Name": service["restart"]},
        "Mounts": [build_mount(stack, mount) for mount in service.get("volumes", [])],
        "LogConfig": {"Type": service["logging"]["driver"], "Config": service["logging"]["options"]},
        "Ulimits": [build_ulimit(limit_name, limit) for limit_name, limit in service.get("ulimits", {}).items()],
        "CapAdd": [normalize_capability(capability_name) for capability_name in service.get("cap_add", [])],
        "NanoCpus": int(float(service["cpus"]) * 10**9) if "cpus" in service else 0,
        "Memory": int(service.get("mem_limit", 0)),
        "NetworkMode": network_name,
        "DeviceRequests": _build_device_requests(service.get("gpus")),
    }
    return {
        "Image": image,
        "Entrypoint": service["entrypoint"],
        "Cmd": service["command"],
        "Env": sorted(f"{key}={value}" for key, value in environment.items()),
        "Labels": service["labels"] | (identity.labels if identity else {}),
        "User": service.get("user", ""),
        "StopTimeout": parse_duration_ns(service["stop_grace_period"]) // 10**9,
        "HostConfig": host_config,
        "NetworkingConfig": {"EndpointsConfig": {network_name: {"Aliases": [service_name]}}},
    }


def collect_container_files(stack: Stack, service_name: str) -> dict[str, bytes]:
    """Return the content of the files in the container of `service_name`, by path."""
    service, document = stack.document["services"][service_name], stack.document
    objects = {item["target"]: document["configs"][item["source"]] for item in service.get("configs", [])}
    objects |= {f"{_SECRETS_FOLDER}/{item['target']}": document["secrets"][item["source"]] for item in service.get("secrets", [])}
    return {path: stack.files[item["file"]] for path, item in objects.items()}


def _build_device_requests(gpus: Any) -> list[RequestBody]:
    if not gpus:
        return []
    selection = {"Count": -1} if gpus == "all" else {"DeviceIDs": gpus[0]["device_ids"]}
    return [{"Driver": "nvidia", "Capabilities": [["gpu"]], **selection}]
