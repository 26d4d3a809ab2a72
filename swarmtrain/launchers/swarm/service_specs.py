"""Convert a stack document to requests to the engine: networks, configs, secrets and services, as `docker stack deploy` sends them.

A port of docker/cli's cli/compose/convert (28.2) for the keys that swarmtrain's stack documents use; any other key is an error.
References to configs, secrets and networks are by name: their ids are known only once they exist.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from typing import Any

from swarmtrain.errors import StackError
from swarmtrain.images.pinning import PinnedImage
from swarmtrain.protocol import LABEL_STACK, LABEL_STACK_IMAGE
from swarmtrain.protocol.run_key import create_run_key
from swarmtrain.render.stack_document import Stack

ApiSpec = dict[str, Any]

_NANOSECONDS_PER_UNIT = {"h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_BYTES_PER_UNIT = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
# Networks that every node has and that do not support aliases.
_LOCAL_NETWORKS = {"default", "bridge", "host", "none"}

_DOCUMENT_KEYS = {"version", "services", "networks", "configs", "secrets", "volumes"}
_SERVICE_KEYS = {
    "image", "entrypoint", "command", "init", "environment", "configs", "secrets", "networks", "volumes", "labels",
    "stop_grace_period", "stop_signal", "logging", "ulimits", "cap_add", "sysctls", "user", "working_dir", "hostname", "deploy",
}  # fmt: skip
_DEPLOY_KEYS = {"mode", "replicas", "endpoint_mode", "labels", "placement", "restart_policy", "update_config", "resources"}
_NETWORK_KEYS = {"driver", "driver_opts", "attachable", "internal", "ipam", "labels", "external", "name"}


@dataclass(frozen=True)
class StackSpecs:
    """Specs of all objects of a stack, by full name. `external_networks` must already exist."""

    stack: str
    networks: Mapping[str, ApiSpec]
    configs: Mapping[str, ApiSpec]
    secrets: Mapping[str, ApiSpec]
    services: Mapping[str, ApiSpec]
    external_networks: tuple[str, ...]


def add_labels(specs: StackSpecs, labels: Mapping[str, str]) -> StackSpecs:
    """Return `specs` in which each service also has `labels`."""
    services = {name: {**spec, "Labels": {**spec["Labels"], **labels}} for name, spec in specs.services.items()}
    return replace(specs, services=services)


def build_stack_specs(stack: Stack, pinned_images: Mapping[str, PinnedImage]) -> StackSpecs:
    """Return the specs of all objects of `stack`; `pinned_images` maps each image reference in the document to its pinned reference.

    Raises StackError for a key that is not supported, even if `docker stack deploy` supports it.
    """
    document = stack.document
    _reject_unknown_keys({key for key in document if not key.startswith("x-")}, _DOCUMENT_KEYS, "the top level")
    networks = document.get("networks", {})
    for name, network in networks.items():
        _reject_unknown_keys(network, _NETWORK_KEYS, f"networks.{name}")
    own_networks = {name: network for name, network in networks.items() if not network.get("external")}
    return StackSpecs(
        stack=stack.name,
        networks={resolve_network_name(stack, name): _build_network_spec(stack, network) for name, network in own_networks.items()},
        configs={
            _add_stack_prefix(stack, key): _build_config_or_secret_spec(stack, key, item)
            for key, item in document.get("configs", {}).items()
        },
        secrets={
            _add_stack_prefix(stack, key): _build_config_or_secret_spec(stack, key, item)
            for key, item in document.get("secrets", {}).items()
        },
        services={
            _add_stack_prefix(stack, name): _build_service_spec(stack, name, item, pinned_images)
            for name, item in document["services"].items()
        },
        external_networks=tuple(sorted(resolve_network_name(stack, name) for name in networks if name not in own_networks)),
    )


def resolve_network_name(stack: Stack, network_key: str) -> str:
    """Return the name that the network `network_key` of the stack document has in the swarm."""
    network = stack.document.get("networks", {}).get(network_key)
    if network is None:
        raise StackError(f"the service uses the network {network_key!r}, which the Compose file does not define", place=f"run {stack.name}")
    return str(network.get("name") or (network_key if network.get("external") else _add_stack_prefix(stack, network_key)))


def _add_stack_prefix(stack: Stack, document_key: str) -> str:
    return f"{stack.name}_{document_key}"


def _add_stack_label(stack: Stack, labels: Mapping[str, str] | None) -> dict[str, str]:
    return {**(labels or {}), LABEL_STACK: stack.name}


def _build_network_spec(stack: Stack, network: ApiSpec) -> ApiSpec:
    spec: ApiSpec = {
        "Driver": network.get("driver") or "overlay",
        "Options": network.get("driver_opts") or {},
        "Internal": bool(network.get("internal")),
        "Attachable": bool(network.get("attachable")),
        "Labels": _add_stack_label(stack, network.get("labels")),
    }
    subnets = [{"Subnet": pool["subnet"]} for pool in network.get("ipam", {}).get("config", [])]
    if subnets:
        spec["IPAM"] = {"Config": subnets}
    return spec


def _build_config_or_secret_spec(stack: Stack, document_key: str, definition: ApiSpec) -> ApiSpec:
    # A key that already exists in the swarm stays: objects are compared by name.
    content = create_run_key() if definition["file"] == stack.key_file else stack.files[definition["file"]]
    data = base64.b64encode(content).decode()
    return {"Name": _add_stack_prefix(stack, document_key), "Labels": _add_stack_label(stack, definition.get("labels")), "Data": data}


def _build_service_spec(stack: Stack, name: str, service: ApiSpec, pinned_images: Mapping[str, PinnedImage]) -> ApiSpec:
    deploy = service.get("deploy", {})
    _reject_unknown_keys(service, _SERVICE_KEYS, f"services.{name}")
    _reject_unknown_keys(deploy, _DEPLOY_KEYS, f"services.{name}.deploy")
    pinned = pinned_images[service["image"]]
    task: ApiSpec = {
        "ContainerSpec": _build_container_spec(stack, service, pinned),
        "Resources": _build_resources(deploy.get("resources", {})),
        "RestartPolicy": _build_restart_policy(deploy.get("restart_policy")),
        "Placement": _build_placement(deploy.get("placement", {}), pinned),
        "Networks": _build_network_attachments(stack, name, service),
        "LogDriver": _build_log_driver(service.get("logging")),
    }
    spec: ApiSpec = {
        "Name": _add_stack_prefix(stack, name),
        "Labels": {**_add_stack_label(stack, deploy.get("labels")), LABEL_STACK_IMAGE: service["image"]},
        "TaskTemplate": _drop_empty_values(task),
        "Mode": {"Replicated": {"Replicas": int(deploy.get("replicas", 1))}},
        "UpdateConfig": _build_update_config(deploy.get("update_config")),
        "EndpointSpec": _drop_empty_values({"Mode": deploy.get("endpoint_mode", "").lower()}),
    }
    return {key: value for key, value in spec.items() if value is not None}


def _build_container_spec(stack: Stack, service: ApiSpec, pinned_image: PinnedImage) -> ApiSpec:
    grace = service.get("stop_grace_period")
    spec = {
        "Image": pinned_image.reference,
        "Labels": _add_stack_label(stack, service.get("labels")),
        "Command": service.get("entrypoint"),
        "Args": service.get("command"),
        "Hostname": service.get("hostname"),
        "Env": sorted(f"{key}={value}" for key, value in service.get("environment", {}).items()),
        "Dir": service.get("working_dir"),
        "User": service.get("user"),
        "Init": service.get("init"),
        "Mounts": [build_mount(stack, mount) for mount in service.get("volumes", [])],
        "StopSignal": service.get("stop_signal"),
        "StopGracePeriod": parse_duration_ns(grace) if grace else None,
        "Secrets": _build_config_or_secret_references(stack, service.get("secrets", []), "SecretName"),
        "Configs": _build_config_or_secret_references(stack, service.get("configs", []), "ConfigName"),
        "Sysctls": service.get("sysctls"),
        "CapabilityAdd": sorted({normalize_capability(name) for name in service.get("cap_add", [])}),
        "Ulimits": [build_ulimit(name, limit) for name, limit in sorted(service.get("ulimits", {}).items())],
    }
    # The CLI sends this field even if it is empty, and the engine stores it: without it, the spec would differ.
    return {**_drop_empty_values(spec), "Privileges": {"CredentialSpec": None, "SELinuxContext": None}}


def _build_config_or_secret_references(stack: Stack, compose_entries: list[ApiSpec], name_key: str) -> list[ApiSpec]:
    references = [
        {
            "File": {
                "Name": item.get("target") or item["source"],
                "UID": str(item.get("uid", "0")),
                "GID": str(item.get("gid", "0")),
                "Mode": int(item.get("mode", 0o444)),
            },
            name_key: _add_stack_prefix(stack, item["source"]),
        }
        for item in compose_entries
    ]
    return sorted(references, key=lambda reference: reference[name_key])


def build_mount(stack: Stack, mount: ApiSpec) -> ApiSpec:
    kind = mount["type"]
    spec = {"Type": kind, "Source": mount.get("source"), "Target": mount["target"], "ReadOnly": mount.get("read_only")}
    if kind == "tmpfs" and "tmpfs" in mount:
        spec["TmpfsOptions"] = _drop_empty_values({"SizeBytes": mount["tmpfs"].get("size")})
        return _drop_empty_values(spec, kept_keys={"TmpfsOptions"})
    if kind == "volume" and mount.get("source"):
        return _build_volume_mount(stack, mount["source"], spec)
    if kind == "bind" and "bind" in mount:
        spec["BindOptions"] = _drop_empty_values({"Propagation": mount["bind"].get("propagation")})
        return _drop_empty_values(spec, kept_keys={"BindOptions"})
    return _drop_empty_values(spec)


def _build_volume_mount(stack: Stack, volume_key: str, mount_spec: ApiSpec) -> ApiSpec:
    defined_volumes = stack.document.get("volumes", {})
    if volume_key not in defined_volumes:
        raise StackError(f"a service mounts the volume {volume_key!r}, which the Compose file does not define", place=f"run {stack.name}")
    volume = defined_volumes[volume_key] or {}
    options: ApiSpec = {}
    if not volume.get("external"):
        options["Labels"] = _add_stack_label(stack, volume.get("labels"))
        if volume.get("driver") or volume.get("driver_opts"):
            options["DriverConfig"] = _drop_empty_values({"Name": volume.get("driver"), "Options": volume.get("driver_opts")})
    scoped_name = volume_key if volume.get("external") else _add_stack_prefix(stack, volume_key)
    return _drop_empty_values(
        {**mount_spec, "Source": volume.get("name") or scoped_name, "VolumeOptions": options}, kept_keys={"VolumeOptions"}
    )


def _build_resources(resources: ApiSpec) -> ApiSpec:
    spec: ApiSpec = {}
    if "limits" in resources:
        limits = resources["limits"]
        spec["Limits"] = _drop_empty_values({**_build_resource_amounts(limits), "Pids": limits.get("pids")})
    if "reservations" in resources:
        reservations = resources["reservations"]
        generic = [
            {"DiscreteResourceSpec": {"Kind": item["discrete_resource_spec"]["kind"], "Value": item["discrete_resource_spec"]["value"]}}
            for item in reservations.get("generic_resources", [])
        ]
        spec["Reservations"] = _drop_empty_values({**_build_resource_amounts(reservations), "GenericResources": generic})
    return spec


def _build_resource_amounts(amounts: ApiSpec) -> ApiSpec:
    return {
        "NanoCPUs": int(Decimal(str(amounts["cpus"])) * 10**9) if "cpus" in amounts else None,
        "MemoryBytes": parse_size_bytes(amounts["memory"]) if "memory" in amounts else None,
    }


def _build_restart_policy(policy: ApiSpec | None) -> ApiSpec | None:
    if policy is None:
        return None
    delay, window, attempts = policy.get("delay"), policy.get("window"), policy.get("max_attempts")
    spec = {
        "Condition": policy.get("condition"),
        "Delay": parse_duration_ns(delay) if delay is not None else None,
        "MaxAttempts": attempts,
        "Window": parse_duration_ns(window) if window is not None else None,
    }
    return {key: value for key, value in spec.items() if value is not None}


def _build_update_config(config: ApiSpec | None) -> ApiSpec | None:
    if config is None:
        return None
    return {
        "Parallelism": config.get("parallelism", 1),
        **_drop_empty_values(
            {
                "Delay": parse_duration_ns(config.get("delay", "0s")),
                "FailureAction": config.get("failure_action"),
                "Monitor": parse_duration_ns(config.get("monitor", "0s")),
            }
        ),
        "MaxFailureRatio": config.get("max_failure_ratio", 0),
        "Order": config.get("order", ""),
    }


def _build_placement(placement: ApiSpec, pinned_image: PinnedImage) -> ApiSpec:
    # ARM nodes report a specific architecture such as armv7l, so a constraint on "arm" would match no node.
    platforms = [
        _drop_empty_values({"Architecture": "" if machine == "arm" else machine, "OS": system})
        for machine, system in pinned_image.platforms
    ]
    max_replicas = placement.get("max_replicas_per_node")
    return _drop_empty_values({"Constraints": placement.get("constraints"), "Platforms": platforms, "MaxReplicas": max_replicas})


def _build_network_attachments(stack: Stack, service_name: str, service: ApiSpec) -> list[ApiSpec]:
    targets = sorted(resolve_network_name(stack, key) for key in service["networks"])
    return [{"Target": target} if target in _LOCAL_NETWORKS else {"Target": target, "Aliases": [service_name]} for target in targets]


def _build_log_driver(logging: ApiSpec | None) -> ApiSpec | None:
    return None if logging is None else _drop_empty_values({"Name": logging.get("driver"), "Options": logging.get("options")})


def build_ulimit(name: str, limit: Any) -> ApiSpec:
    soft, hard = (limit["soft"], limit["hard"]) if isinstance(limit, dict) else (limit, limit)
    return {"Name": name, "Hard": hard, "Soft": soft}


def normalize_capability(name: str) -> str:
    upper = name.strip().upper()
    return upper if upper == "ALL" or upper.startswith("CAP_") else f"CAP_{upper}"


def parse_duration_ns(duration: str) -> int:
    """Return the duration, given in Go's notation (`1m30s`, `2.5s`), in nanoseconds. Raises StackError if it is invalid."""
    parts = re.findall(r"([0-9.]+)(h|ms|us|ns|m|s)", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise StackError(f"{duration!r} is not a duration such as 90s or 1m30s", place="Compose file")
    return int(sum(Decimal(number) * _NANOSECONDS_PER_UNIT[unit] for number, unit in parts))


def parse_size_bytes(size: str) -> int:
    """Return the size (`512m`, `16gib`, or bytes) in bytes; units are powers of 1024. Raises StackError if it is invalid."""
    match = re.fullmatch(r"([0-9.]+) ?([kmgt]?)i?(b?)", size.lower())
    try:
        return int(Decimal(match[1]) * _BYTES_PER_UNIT[match[2]]) if match else int(size)
    except (InvalidOperation, ValueError):
        raise StackError(f"{size!r} is not a valid size such as 512m", place="Compose file") from None


def _drop_empty_values(spec: ApiSpec, kept_keys: set[str] | frozenset[str] = frozenset()) -> ApiSpec:
    """Return `spec` without empty values, which the docker CLI's JSON omits, but with `Resources`, which the CLI sends even if empty."""
    return {key: value for key, value in spec.items() if key in kept_keys or key == "Resources" or value not in (None, "", 0, [], {})}


def _reject_unknown_keys(keys: Any, known_keys: set[str], location: str) -> None:
    unknown = sorted(set(keys) - known_keys)
    if unknown:
        raise StackError(f"{location} has {', '.join(unknown)}, which the Swarm launcher does not support", place="Compose file")
