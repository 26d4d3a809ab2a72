"""Generic resources, such as GPUs, as the engine's API represents them: named (one entry each) or discrete (a count per kind)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

ApiObject = dict[str, Any]
TOOLKIT_CONFIG_PATH = "/etc/nvidia-container-runtime/config.toml"


def get_assigned_resources(task: ApiObject) -> list[ApiObject]:
    """Return the resources assigned to a task; for a pending task, the resources that it reserves."""
    # The engine's responses use the first key, its API reference the second.
    resources: list[ApiObject] = (
        task.get("GenericResources") or task.get("AssignedGenericResources") or get_reserved_resources(task["Spec"])
    )
    return resources


def get_reserved_resources(task_spec: ApiObject) -> list[ApiObject]:
    """Return the generic resources that a task reserves."""
    resources: list[ApiObject] = ((task_spec.get("Resources") or {}).get("Reservations") or {}).get("GenericResources") or []
    return resources


def count_resources(resources: Iterable[ApiObject], kind: str) -> int:
    """Return the number of resources of `kind`: one per named entry, plus the values of the discrete ones."""
    discrete = [item.get("DiscreteResourceSpec") or {} for item in resources]
    return len(list_resource_ids(resources, kind)) + sum(int(item["Value"]) for item in discrete if item.get("Kind") == kind)


def list_resource_ids(resources: Iterable[ApiObject], kind: str | None = None) -> tuple[str, ...]:
    """Return the ids of the named resources of `kind`, or of every kind."""
    named = [item.get("NamedResourceSpec") or {} for item in resources]
    return tuple(item["Value"] for item in named if item and kind in (None, item.get("Kind")))


def count_resources_by_kind(resources: Iterable[ApiObject]) -> dict[str, int]:
    """Return the number of resources of each kind."""
    items = list(resources)
    kinds = [(item.get("NamedResourceSpec") or item.get("DiscreteResourceSpec") or {}).get("Kind") for item in items]
    return {kind: count_resources(items, kind) for kind in kinds if kind}


def describe_resources(resources: Iterable[ApiObject]) -> tuple[str, ...]:
    """Return the ids of the named resources, and "COUNT KIND" for the discrete ones."""
    items = list(resources)
    discrete = [item["DiscreteResourceSpec"] for item in items if item.get("DiscreteResourceSpec")]
    return (*list_resource_ids(items), *(f"{item['Value']} {item['Kind']}" for item in discrete))


def format_gpu_settings(resource_kind: str, gpus: Sequence[str] = ()) -> str:
    """Return the daemon.json settings with which Swarm assigns a node's GPUs, with instructions for the node's owner.

    `gpus` are the GPUs' UUIDs, if known.
    """
    entry_note = "" if gpus else ", with one entry per UUID listed by nvidia-smi -L"
    daemon_json = json.dumps(build_daemon_json(resource_kind, gpus))
    return (
        f"in its /etc/docker/daemon.json: {daemon_json}{entry_note}; in its {TOOLKIT_CONFIG_PATH}, as the first line: "
        f"{format_toolkit_setting(resource_kind)}; then: systemctl restart docker"
    )


def build_daemon_json(resource_kind: str, gpus: Sequence[str] = ()) -> dict[str, Any]:
    """Return the daemon.json settings with which Swarm assigns a node's GPUs and containers see them."""
    nvidia_runtime = {"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime", "args": []}}}
    return {**nvidia_runtime, "node-generic-resources": [f"{resource_kind}={gpu}" for gpu in gpus or ["GPU-UUID"]]}


def format_toolkit_setting(resource_kind: str) -> str:
    """Return the line of the NVIDIA Container Toolkit's config with which a container sees only the GPUs that Swarm assigned to it."""
    return f'swarm-resource = "DOCKER_RESOURCE_{resource_kind.upper()}"'
