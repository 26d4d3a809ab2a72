"""Document for one engine → what is sent to it: a network, and for each service the container that `docker compose` would make."""

from __future__ import annotations

from typing import Any

from swarmtrain.launchers.swarm.specs import capability, mount_of, nanoseconds, ulimit
from swarmtrain.render.compose import NETWORK, Stack

Body = dict[str, Any]

_SECRETS = "/run/secrets"


def network(stack: Stack) -> Body:
    """Return the run's network."""
    found = stack.document["networks"][NETWORK]
    return {"Name": found["name"], "Driver": found["driver"], "Internal": found.get("internal", False), "Labels": found["labels"]}


def container(stack: Stack, name: str, image: str) -> Body:
    """Return the container of a service, of the image with this id. Raises StackError."""
    service, bridge = stack.document["services"][name], network(stack)["Name"]
    host = {
        "Init": service["init"],
        "RestartPolicy": {"Name": service["restart"]},
        "Mounts": [mount_of(stack, mount) for mount in service.get("volumes", [])],
        "LogConfig": {"Type": service["logging"]["driver"], "Config": service["logging"]["options"]},
        "Ulimits": [ulimit(kind, limit) for kind, limit in service.get("ulimits", {}).items()],
        "CapAdd": [capability(each) for each in service.get("cap_add", [])],
        "NanoCpus": int(float(service["cpus"]) * 10**9) if "cpus" in service else 0,
        "Memory": int(service.get("mem_limit", 0)),
        "NetworkMode": bridge,
        "DeviceRequests": _devices(service.get("gpus")),
    }
    return {
        "Image": image,
        "Entrypoint": service["entrypoint"],
        "Cmd": service["command"],
        "Env": sorted(f"{key}={value}" for key, value in service["environment"].items()),
        "Labels": service["labels"],
        "User": service.get("user", ""),
        "StopTimeout": nanoseconds(service["stop_grace_period"]) // 10**9,
        "HostConfig": host,
        "NetworkingConfig": {"EndpointsConfig": {bridge: {"Aliases": [name]}}},
    }


def files(stack: Stack, name: str) -> dict[str, bytes]:
    """Return the files that a service finds in its container, by path."""
    service, document = stack.document["services"][name], stack.document
    found = {item["target"]: document["configs"][item["source"]] for item in service.get("configs", [])}
    found |= {f"{_SECRETS}/{item['target']}": document["secrets"][item["source"]] for item in service.get("secrets", [])}
    return {path: stack.files[item["file"]] for path, item in found.items()}


def _devices(gpus: Any) -> list[Body]:
    if not gpus:
        return []
    wanted = {"Count": -1} if gpus == "all" else {"DeviceIDs": gpus[0]["device_ids"]}
    return [{"Driver": "nvidia", "Capabilities": [["gpu"]], **wanted}]
