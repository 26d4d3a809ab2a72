"""A registry in the swarm itself, for those who have none: one service on one node, its images in a volume there.

It speaks plain HTTP, as a registry without a certificate does: every engine must be told that it may.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarmtrain.errors import EngineError, ImageError
from swarmtrain.images.engine import Say
from swarmtrain.images.pin import pin
from swarmtrain.images.swarm import Swarm, host, own_id
from swarmtrain.images.swarm import address as address_of

NAME = "swarmtrain-registry"
"""Of the service, and of the volume with its images."""
IMAGE = "registry:2.8.3"
PORT = 5000
_PLACE = f"service {NAME}"
_TARGET = 5000
_VOLUME = "/var/lib/registry"
_MEMORY = 2**30
_SECOND = 10**9
_PATIENCE = 120.0  # seconds for its image to be pulled and its container to start
_TAKEN = ("already in use", "already allocated", "host-mode port")
_DOWN = f"swarmtrain image registry down, then up again; its images stay in the volume {NAME}"


@dataclass(frozen=True)
class Standing:
    """How the registry stands. `address` is what the names of its images begin with."""

    address: str
    host: str
    image: str
    state: str
    reason: str
    trust: str
    """What keeps the engine that was asked from using it, or nothing."""
    insecure: tuple[str, ...]
    """What that engine's `insecure-registries` should hold."""

    @property
    def line(self) -> str:
        """The line for every engine's daemon.json."""
        return f'"insecure-registries": {json.dumps(list(self.insecure))}'

    def to_dict(self) -> dict[str, object]:
        """Return what a script needs, for --json."""
        return {
            "address": self.address,
            "host": self.host,
            "image": self.image,
            "state": self.state,
            "reason": self.reason,
            "trust": self.trust,
        }

    def __str__(self) -> str:
        lines = [
            f"{self.address} on {self.host}, {self.image}, {self.state}" + (f": {self.reason}" if self.reason else ""),
            f"this engine cannot use it yet: {self.trust}" if self.trust else "this engine can use it",
            f"every engine needs this in its /etc/docker/daemon.json: {self.line}",
        ]
        return "\n".join(lines)


def up(engine: Swarm, *, node: str | None = None, port: int = PORT, image: str = IMAGE, say: Say) -> Standing:
    """Start the registry on `node`, by default that of the engine, and return when it runs; one that is up already stays.

    Raises ImageError with what keeps it from running, EngineError.
    """
    there = _node(engine, node)
    wanted = _spec(there["ID"], port, image)
    if found := _service(engine):
        if (found["Spec"]["Labels"], _constraints(found["Spec"])) != (wanted["Labels"], _constraints(wanted)):
            raise ImageError("it is up already, with another node, port or image", place=_PLACE, hint=_DOWN)
        say("it is up already")
    else:
        wanted["TaskTemplate"]["ContainerSpec"]["Image"] = _pinned(engine, image, say)
        say(f"starting {image} on {host(there)}, port {port}")
        engine.post("/services/create", wanted, image=image)
    try:
        _await_running(engine, host(there), port, say)
    except BaseException:
        if not found:
            engine.delete(f"/services/{NAME}")
        raise
    return status(engine)


def down(engine: Swarm, *, volume: bool, say: Say) -> None:
    """Remove the registry, and with `volume` its images too; return when its container is gone. Raises ImageError, EngineError."""
    service = _found(engine)
    node = _constraints(service["Spec"])[0].partition("==")[2]
    if volume and node != own_id(engine):
        where = host(engine.get(f"/nodes/{node}"))
        raise ImageError(
            f"its images are on {where}, whose engine is another one",
            place=_PLACE,
            hint=f"swarmtrain image registry down, and on {where}: docker volume rm {NAME}",
        )
    engine.delete(f"/services/{NAME}")
    say("waiting for its container to stop")
    end = time.monotonic() + _PATIENCE
    while [task for task in engine.listing("/tasks") if task.get("ServiceID") == service["ID"]] and time.monotonic() < end:
        time.sleep(0.2)
    if volume:
        _remove_volume(engine, end)


def status(engine: Swarm) -> Standing:
    """Return how the registry stands. Raises ImageError if there is none, EngineError."""
    service = _found(engine)
    labels = service["Spec"]["Labels"]
    node = engine.get(f"/nodes/{_constraints(service['Spec'])[0].partition('==')[2]}")
    address = f"{address_of(node)}:{labels['swarmtrain.port']}"
    newest = next((task["Status"] for task in _tasks(engine)), {"State": "new"})
    indexes = engine.get("/info").get("RegistryConfig", {}).get("IndexConfigs") or {}
    known = {name for name, entry in indexes.items() if not entry.get("Secure", True)}
    return Standing(
        address=address,
        host=host(node),
        image=labels["swarmtrain.image"],
        state=str(newest["State"]),
        reason=str(newest.get("Err", "")),
        trust=_trust(engine, address) if newest["State"] == "running" else "it does not run",
        insecure=tuple(sorted({*known, address})),
    )


def _spec(node: str, port: int, image: str) -> dict[str, Any]:
    mount = {"Type": "volume", "Source": NAME, "Target": _VOLUME}
    published = {"Protocol": "tcp", "TargetPort": _TARGET, "PublishedPort": port, "PublishMode": "host"}
    return {
        "Name": NAME,
        "Labels": {"swarmtrain.port": str(port), "swarmtrain.image": image},
        "TaskTemplate": {
            "ContainerSpec": {"Image": image, "Env": ["REGISTRY_STORAGE_DELETE_ENABLED=true"], "Mounts": [mount]},
            "Resources": {"Limits": {"MemoryBytes": _MEMORY}},
            "RestartPolicy": {"Condition": "any", "Delay": 5 * _SECOND},
            "Placement": {"Constraints": [f"node.id=={node}"]},
        },
        "Mode": {"Replicated": {"Replicas": 1}},
        "UpdateConfig": {"Parallelism": 1, "Order": "stop-first"},
        "EndpointSpec": {"Mode": "dnsrr", "Ports": [published]},
    }


def _pinned(engine: Swarm, image: str, say: Say) -> str:
    try:
        return pin(engine, image).reference
    except ImageError as error:
        say(f"{image} is not pinned, the node must have it: {error.message}")
        return image


def _await_running(engine: Swarm, where: str, port: int, say: Say) -> None:
    """Return when the registry's task runs. Raises ImageError with the reason as soon as it cannot."""
    end, last = time.monotonic() + _PATIENCE, ""
    while time.monotonic() < end:
        # A container that does not start is followed by another one: whichever task has a reason tells it.
        tasks = [task["Status"] for task in _tasks(engine)] or [{"State": "new"}]
        if any(task["State"] == "running" for task in tasks):
            return
        for task in tasks:
            _refuse(task["State"], task.get("Err", ""), where, port)
        state, why = tasks[0]["State"], tasks[0].get("Err", "")
        if (line := f"{state} {why}".strip()) != last:
            say(line)
            last = line
        time.sleep(0.2)
    raise ImageError(f"it does not run on {where} after {_PATIENCE:.0f} s: {last}", place=_PLACE, hint=f"docker service ps {NAME}")


def _refuse(state: str, why: str, where: str, port: int) -> None:
    if any(words in why for words in _TAKEN):
        hint = f"swarmtrain image registry up --port {port + 1}"
        raise ImageError(f"something else has port {port} of {where}: {why}", place=_PLACE, hint=hint)
    if state in ("rejected", "failed", "complete"):
        hint = "--image names one that the node has or can pull" if state == "rejected" else f"docker service logs {NAME}"
        raise ImageError(f"it does not start on {where}: {why}", place=_PLACE, hint=hint)


def _trust(engine: Swarm, address: str) -> str:
    """Return what keeps the engine from using the registry: it is asked for an image that nobody has."""
    try:
        engine.distribution(f"{address}/none:none")
    except EngineError as error:
        if any(words in error.message.lower() for words in ("unknown", "not found", "denied")):
            return ""
        if "HTTP response to HTTPS client" in error.message:
            return "it is not among its insecure-registries"
        return error.message
    return ""


def _remove_volume(engine: Swarm, end: float) -> None:
    while True:
        try:
            engine.delete(f"/volumes/{NAME}")
        except EngineError as error:
            if error.status != 409 or time.monotonic() > end:
                raise
            time.sleep(0.2)
        else:
            return


def _service(engine: Swarm) -> dict[str, Any] | None:
    return next((service for service in engine.listing("/services", name=NAME) if service["Spec"]["Name"] == NAME), None)


def _found(engine: Swarm) -> dict[str, Any]:
    service = _service(engine)
    if service is None or "swarmtrain.port" not in service["Spec"].get("Labels", {}):
        raise ImageError("there is no registry in this swarm", place=_PLACE, hint="swarmtrain image registry up")
    return service


def _tasks(engine: Swarm) -> list[dict[str, Any]]:
    """Return the registry's tasks, the newest first."""
    return sorted(engine.listing("/tasks", service=NAME), key=lambda task: str(task["CreatedAt"]), reverse=True)


def _node(engine: Swarm, name: str | None) -> dict[str, Any]:
    nodes = engine.listing("/nodes")
    wanted = name or own_id(engine)
    for node in nodes:
        if wanted in (node["ID"], host(node)):
            return node
    there = ", ".join(sorted(host(node) for node in nodes))
    raise ImageError(f"there is no such node; there is: {there}", place=f"node {wanted}", hint="docker node ls")


def _constraints(spec: Mapping[str, Any]) -> list[str]:
    found: list[str] = spec["TaskTemplate"]["Placement"]["Constraints"]
    return found
