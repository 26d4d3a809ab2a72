"""Stack document → what is sent to the engine: networks, configs, secrets and services, as `docker stack deploy` sends them.

A port of docker/cli's cli/compose/convert (28.2) for the keys that our documents use; any other key is refused rather
than dropped. Configs, secrets and networks are named here: their ids are known only once they exist.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from swarmtrain.errors import StackError
from swarmtrain.images.pin import Pinned
from swarmtrain.render.compose import Stack
from swarmtrain.wire import LABEL_STACK, LABEL_STACK_IMAGE

Spec = dict[str, Any]

_NANOSECONDS = {"h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_SIZES = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
# Networks that every node has and that know no aliases.
_LOCAL_NETWORKS = {"default", "bridge", "host", "none"}

_TOP = {"version", "services", "networks", "configs", "secrets", "volumes"}
_SERVICE = {
    "image", "entrypoint", "command", "init", "environment", "configs", "secrets", "networks", "volumes", "labels",
    "stop_grace_period", "stop_signal", "logging", "ulimits", "cap_add", "sysctls", "user", "working_dir", "hostname", "deploy",
}  # fmt: skip
_DEPLOY = {"mode", "replicas", "endpoint_mode", "labels", "placement", "restart_policy", "update_config", "resources"}
_NETWORK = {"driver", "driver_opts", "attachable", "internal", "ipam", "labels", "external", "name"}


@dataclass(frozen=True)
class Specs:
    """All that makes a stack, by full name. `external` are networks that must be there already."""

    stack: str
    networks: Mapping[str, Spec]
    configs: Mapping[str, Spec]
    secrets: Mapping[str, Spec]
    services: Mapping[str, Spec]
    external: tuple[str, ...]


def specs(stack: Stack, pins: Mapping[str, Pinned]) -> Specs:
    """Return the specs of `stack`, images as `pins` (image as written → pinned) says.

    Raises StackError for a key that `docker stack deploy` might honour and this does not.
    """
    document = stack.document
    _known({key for key in document if not key.startswith("x-")}, _TOP, "the document")
    networks = document.get("networks", {})
    for name, network in networks.items():
        _known(network, _NETWORK, f"networks.{name}")
    own = {name: network for name, network in networks.items() if not network.get("external")}
    return Specs(
        stack=stack.name,
        networks={network_name(stack, name): _network(stack, network) for name, network in own.items()},
        configs={_scoped(stack, key): _file(stack, key, item) for key, item in document.get("configs", {}).items()},
        secrets={_scoped(stack, key): _file(stack, key, item) for key, item in document.get("secrets", {}).items()},
        services={_scoped(stack, name): _service(stack, name, item, pins) for name, item in document["services"].items()},
        external=tuple(sorted(network_name(stack, name) for name in networks if name not in own)),
    )


def network_name(stack: Stack, key: str) -> str:
    """Return the name that the network `key` of the document has in the swarm."""
    network = stack.document.get("networks", {}).get(key)
    if network is None:
        raise StackError(f"the service uses the network {key!r}, which the document does not define", place=f"run {stack.name}")
    return str(network.get("name") or (key if network.get("external") else _scoped(stack, key)))


def _scoped(stack: Stack, key: str) -> str:
    return f"{stack.name}_{key}"


def _labelled(stack: Stack, labels: Mapping[str, str] | None) -> dict[str, str]:
    return {**(labels or {}), LABEL_STACK: stack.name}


def _network(stack: Stack, network: Spec) -> Spec:
    spec: Spec = {
        "Driver": network.get("driver") or "overlay",
        "Options": network.get("driver_opts") or {},
        "Internal": bool(network.get("internal")),
        "Attachable": bool(network.get("attachable")),
        "Labels": _labelled(stack, network.get("labels")),
    }
    subnets = [{"Subnet": pool["subnet"]} for pool in network.get("ipam", {}).get("config", [])]
    if subnets:
        spec["IPAM"] = {"Config": subnets}
    return spec


def _file(stack: Stack, key: str, item: Spec) -> Spec:
    data = base64.b64encode(stack.files[item["file"]]).decode()
    return {"Name": _scoped(stack, key), "Labels": _labelled(stack, item.get("labels")), "Data": data}


def _service(stack: Stack, name: str, service: Spec, pins: Mapping[str, Pinned]) -> Spec:
    deploy = service.get("deploy", {})
    _known(service, _SERVICE, f"services.{name}")
    _known(deploy, _DEPLOY, f"services.{name}.deploy")
    pinned = pins[service["image"]]
    task: Spec = {
        "ContainerSpec": _container(stack, service, pinned),
        "Resources": _resources(deploy.get("resources", {})),
        "RestartPolicy": _restart_policy(deploy.get("restart_policy")),
        "Placement": _placement(deploy.get("placement", {}), pinned),
        "Networks": _attachments(stack, name, service),
        "LogDriver": _log_driver(service.get("logging")),
    }
    spec: Spec = {
        "Name": _scoped(stack, name),
        "Labels": {**_labelled(stack, deploy.get("labels")), LABEL_STACK_IMAGE: service["image"]},
        "TaskTemplate": _given(task),
        "Mode": {"Replicated": {"Replicas": int(deploy.get("replicas", 1))}},
        "UpdateConfig": _update_config(deploy.get("update_config")),
        "EndpointSpec": _given({"Mode": deploy.get("endpoint_mode", "").lower()}),
    }
    return {key: value for key, value in spec.items() if value is not None}


def _container(stack: Stack, service: Spec, pinned: Pinned) -> Spec:
    grace = service.get("stop_grace_period")
    spec = {
        "Image": pinned.reference,
        "Labels": _labelled(stack, service.get("labels")),
        "Command": service.get("entrypoint"),
        "Args": service.get("command"),
        "Hostname": service.get("hostname"),
        "Env": sorted(f"{key}={value}" for key, value in service.get("environment", {}).items()),
        "Dir": service.get("working_dir"),
        "User": service.get("user"),
        "Init": service.get("init"),
        "Mounts": [mount_of(stack, mount) for mount in service.get("volumes", [])],
        "StopSignal": service.get("stop_signal"),
        "StopGracePeriod": nanoseconds(grace) if grace else None,
        "Secrets": _references(stack, service.get("secrets", []), "SecretName"),
        "Configs": _references(stack, service.get("configs", []), "ConfigName"),
        "Sysctls": service.get("sysctls"),
        "CapabilityAdd": sorted({capability(name) for name in service.get("cap_add", [])}),
        "Ulimits": [ulimit(name, limit) for name, limit in sorted(service.get("ulimits", {}).items())],
    }
    # The CLI sends this empty, and the engine then keeps it: leaving it out would make another spec.
    return {**_given(spec), "Privileges": {"CredentialSpec": None, "SELinuxContext": None}}


def _references(stack: Stack, items: list[Spec], name_key: str) -> list[Spec]:
    references = [
        {
            "File": {
                "Name": item.get("target") or item["source"],
                "UID": str(item.get("uid", "0")),
                "GID": str(item.get("gid", "0")),
                "Mode": int(item.get("mode", 0o444)),
            },
            name_key: _scoped(stack, item["source"]),
        }
        for item in items
    ]
    return sorted(references, key=lambda reference: reference[name_key])


def mount_of(stack: Stack, mount: Spec) -> Spec:
    kind = mount["type"]
    spec = {"Type": kind, "Source": mount.get("source"), "Target": mount["target"], "ReadOnly": mount.get("read_only")}
    if kind == "tmpfs" and "tmpfs" in mount:
        spec["TmpfsOptions"] = _given({"SizeBytes": mount["tmpfs"].get("size")})
        return _given(spec, keep={"TmpfsOptions"})
    if kind == "volume" and mount.get("source"):
        return _volume(stack, mount["source"], spec)
    if kind == "bind" and "bind" in mount:
        spec["BindOptions"] = _given({"Propagation": mount["bind"].get("propagation")})
        return _given(spec, keep={"BindOptions"})
    return _given(spec)


def _volume(stack: Stack, key: str, spec: Spec) -> Spec:
    defined = stack.document.get("volumes", {})
    if key not in defined:
        raise StackError(f"a service mounts the volume {key!r}, which the document does not define", place=f"run {stack.name}")
    volume = defined[key] or {}
    options: Spec = {}
    if not volume.get("external"):
        options["Labels"] = _labelled(stack, volume.get("labels"))
        if volume.get("driver") or volume.get("driver_opts"):
            options["DriverConfig"] = _given({"Name": volume.get("driver"), "Options": volume.get("driver_opts")})
    scoped = key if volume.get("external") else _scoped(stack, key)
    return _given({**spec, "Source": volume.get("name") or scoped, "VolumeOptions": options}, keep={"VolumeOptions"})


def _resources(resources: Spec) -> Spec:
    spec: Spec = {}
    if "limits" in resources:
        limits = resources["limits"]
        spec["Limits"] = _given({**_amounts(limits), "Pids": limits.get("pids")})
    if "reservations" in resources:
        reservations = resources["reservations"]
        generic = [
            {"DiscreteResourceSpec": {"Kind": item["discrete_resource_spec"]["kind"], "Value": item["discrete_resource_spec"]["value"]}}
            for item in reservations.get("generic_resources", [])
        ]
        spec["Reservations"] = _given({**_amounts(reservations), "GenericResources": generic})
    return spec


def _amounts(amounts: Spec) -> Spec:
    return {
        "NanoCPUs": int(Decimal(str(amounts["cpus"])) * 10**9) if "cpus" in amounts else None,
        "MemoryBytes": size(amounts["memory"]) if "memory" in amounts else None,
    }


def _restart_policy(policy: Spec | None) -> Spec | None:
    if policy is None:
        return None
    delay, window, attempts = policy.get("delay"), policy.get("window"), policy.get("max_attempts")
    spec = {
        "Condition": policy.get("condition"),
        "Delay": nanoseconds(delay) if delay is not None else None,
        "MaxAttempts": attempts,
        "Window": nanoseconds(window) if window is not None else None,
    }
    return {key: value for key, value in spec.items() if value is not None}


def _update_config(config: Spec | None) -> Spec | None:
    if config is None:
        return None
    return {
        "Parallelism": config.get("parallelism", 1),
        **_given(
            {
                "Delay": nanoseconds(config.get("delay", "0s")),
                "FailureAction": config.get("failure_action"),
                "Monitor": nanoseconds(config.get("monitor", "0s")),
            }
        ),
        "MaxFailureRatio": config.get("max_failure_ratio", 0),
        "Order": config.get("order", ""),
    }


def _placement(placement: Spec, pinned: Pinned) -> Spec:
    # Nodes call their architecture armv7l and the like, so that "arm" would fit none of them.
    platforms = [_given({"Architecture": "" if machine == "arm" else machine, "OS": system}) for machine, system in pinned.platforms]
    maximum = placement.get("max_replicas_per_node")
    return _given({"Constraints": placement.get("constraints"), "Platforms": platforms, "MaxReplicas": maximum})


def _attachments(stack: Stack, name: str, service: Spec) -> list[Spec]:
    targets = sorted(network_name(stack, key) for key in service["networks"])
    return [{"Target": target} if target in _LOCAL_NETWORKS else {"Target": target, "Aliases": [name]} for target in targets]


def _log_driver(logging: Spec | None) -> Spec | None:
    return None if logging is None else _given({"Name": logging.get("driver"), "Options": logging.get("options")})


def ulimit(name: str, limit: Any) -> Spec:
    soft, hard = (limit["soft"], limit["hard"]) if isinstance(limit, dict) else (limit, limit)
    return {"Name": name, "Hard": hard, "Soft": soft}


def capability(name: str) -> str:
    upper = name.strip().upper()
    return upper if upper == "ALL" or upper.startswith("CAP_") else f"CAP_{upper}"


def nanoseconds(duration: str) -> int:
    """Return a duration in Go's notation (`1m30s`, `2.5s`) in nanoseconds. Raises StackError if it is none."""
    parts = re.findall(r"([0-9.]+)(h|ms|us|ns|m|s)", duration)
    if not parts or "".join(number + unit for number, unit in parts) != duration:
        raise StackError(f"{duration!r} is not a duration such as 90s or 1m30s", place="stack document")
    return int(sum(Decimal(number) * _NANOSECONDS[unit] for number, unit in parts))


def size(text: str) -> int:
    """Return a size (`512m`, `16gib`, bytes) in bytes, units being powers of 1024. Raises StackError if it is none."""
    match = re.fullmatch(r"([0-9.]+) ?([kmgt]?)i?(b?)", text.lower())
    try:
        return int(Decimal(match[1]) * _SIZES[match[2]]) if match else int(text)
    except (InvalidOperation, ValueError):
        raise StackError(f"{text!r} is not a size such as 512m", place="stack document") from None


def _given(spec: Spec, keep: set[str] | frozenset[str] = frozenset()) -> Spec:
    """Leave out what is empty, as the CLI's JSON does; `Resources` is a pointer there, sent even when empty."""
    return {key: value for key, value in spec.items() if key in keep or key == "Resources" or value not in (None, "", 0, [], {})}


def _known(given: Any, known: set[str], where: str) -> None:
    unknown = sorted(set(given) - known)
    if unknown:
        raise StackError(f"{where} has {', '.join(unknown)}, which the Swarm launcher cannot send", place="stack document")
