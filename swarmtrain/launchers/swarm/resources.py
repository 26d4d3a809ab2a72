"""Generic resources, such as GPUs, as the engine's API writes them: by name (an entry each) or as a number of a kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

Raw = dict[str, Any]
TOOLKIT = "/etc/nvidia-container-runtime/config.toml"


def given(task: Raw) -> list[Raw]:
    """Return what a task was given, or while it waits what it reserves."""
    # The engine's own reference calls it the second name, its answers the first.
    found: list[Raw] = task.get("GenericResources") or task.get("AssignedGenericResources") or reserved(task["Spec"])
    return found


def reserved(task_spec: Raw) -> list[Raw]:
    """Return the generic resources that a task is to have."""
    found: list[Raw] = ((task_spec.get("Resources") or {}).get("Reservations") or {}).get("GenericResources") or []
    return found


def amount(generic: Iterable[Raw], kind: str) -> int:
    """Count the named resources of `kind`, one entry each, and add up the discrete ones."""
    discrete = [item.get("DiscreteResourceSpec") or {} for item in generic]
    return len(names(generic, kind)) + sum(int(item["Value"]) for item in discrete if item.get("Kind") == kind)


def names(generic: Iterable[Raw], kind: str | None = None) -> tuple[str, ...]:
    """Return the ids of the named resources, of `kind` or of any."""
    named = [item.get("NamedResourceSpec") or {} for item in generic]
    return tuple(item["Value"] for item in named if item and kind in (None, item.get("Kind")))


def counted(generic: Iterable[Raw]) -> dict[str, int]:
    """Return how many there are of each kind."""
    items = list(generic)
    kinds = [(item.get("NamedResourceSpec") or item.get("DiscreteResourceSpec") or {}).get("Kind") for item in items]
    return {kind: amount(items, kind) for kind in kinds if kind}


def described(generic: Iterable[Raw]) -> tuple[str, ...]:
    """Return the ids of those that have one, and of the others how many of which kind."""
    items = list(generic)
    discrete = [item["DiscreteResourceSpec"] for item in items if item.get("DiscreteResourceSpec")]
    return (*names(items), *(f"{item['Value']} {item['Kind']}" for item in discrete))


def settings(kind: str, gpus: Sequence[str] = ()) -> str:
    """Return what a node's owner has to write, and where, so that Swarm gives out its GPUs; those of UUIDs `gpus` if they are known."""
    each = "" if gpus else ", an entry for each UUID that nvidia-smi -L shows"
    return (
        f"in its /etc/docker/daemon.json: {json.dumps(daemon(kind, gpus))}{each}; in its {TOOLKIT}, as the first line: {toolkit(kind)}; "
        "then: systemctl restart docker"
    )


def daemon(kind: str, gpus: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the engine's daemon.json must say, so that Swarm gives out its GPUs and containers see them."""
    nvidia = {"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}}}
    return {**nvidia, "node-generic-resources": [f"{kind}={gpu}" for gpu in gpus or ["GPU-UUID"]]}


def toolkit(kind: str) -> str:
    """Return the line of the toolkit's settings by which it shows a container the GPUs that Swarm gave it."""
    return f'swarm-resource = "DOCKER_RESOURCE_{kind.upper()}"'
