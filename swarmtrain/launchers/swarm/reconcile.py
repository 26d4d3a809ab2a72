"""Compute the steps from the existing state of a stack to the desired state, each with its cause. Pure functions.

Before services are compared, their ids are replaced by names, and defaults that the engine filled in are removed. So a stack that was
started with plain `docker stack deploy` is equivalent to one that swarmtrain started.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import IPv4Network
from typing import Any, NoReturn

from swarmtrain.config.schema.fields.overlay_subnet import suggest_subnet
from swarmtrain.errors import StackError
from swarmtrain.launchers.swarm.cluster_state import Service, StackState
from swarmtrain.launchers.swarm.service_specs import ApiSpec, StackSpecs

# Default values that the engine itself adds to a stored spec.
_ENGINE_DEFAULTS = {"Runtime": "container", "Isolation": "default"}
# Built-in networks of the engine that services can use.
_BUILTIN_NETWORKS = ("host", "bridge", "none")
_VXLAN_IDS_OPTION = "com.docker.network.driver.overlay.vxlanid_list"
_MAX_SHOWN_CHANGES = 3
_MAX_VALUE_CHARACTERS = 60


class ObjectKind(StrEnum):
    """The type of object that a step changes, as in the docker command line."""

    network = "network"
    secret = "secret"  # noqa: S105  # the object's kind
    config = "config"
    service = "service"


class StepVerb(StrEnum):
    """Action that a reconcile step performs on its object."""

    create = "create"
    update = "update"
    remove = "remove"


@dataclass(frozen=True)
class ReconcileStep:
    """Reconcile step: one request to the engine, and its cause.

    `restarts`: containers are replaced. `interrupts_run`: the replaced containers are running.
    """

    verb: StepVerb
    kind: ObjectKind
    name: str
    cause: str
    spec: ApiSpec | None = None
    service: Service | None = None
    id: str = ""
    restarts: bool = False
    interrupts_run: bool = False

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.name}: {self.cause}"


@dataclass(frozen=True)
class EndedRun:
    """Outcome of an ended run: its coordinator has exited, and no process runs until the run is restarted."""

    failed: bool
    why: str


def reconcile(desired: StackSpecs, existing: StackState, ended_run: EndedRun | None = None) -> list[ReconcileStep]:
    """Return the steps that turn `existing` into `desired`, in order; none if they match.

    A run that has ended (`ended_run` is not None) is restarted completely if it failed, or if anything about it changes. Raises StackError
    for a network that would have to be changed in place, which Swarm cannot do.
    """
    check_networks(desired, existing)
    restart_cause = _describe_restart_cause(desired, existing, ended_run)
    return [
        *_plan_creations(ObjectKind.config, desired.configs, existing.configs),
        *_plan_creations(ObjectKind.secret, desired.secrets, existing.secrets),
        *_plan_creations(ObjectKind.network, desired.networks, existing.networks),
        *_plan_service_steps(desired, existing, restart_cause),
        *_plan_removals(ObjectKind.config, existing.configs, desired.configs),
        *_plan_removals(ObjectKind.secret, existing.secrets, desired.secrets),
    ]


def _describe_restart_cause(desired: StackSpecs, existing: StackState, ended_run: EndedRun | None) -> str:
    if ended_run is None:
        return ""
    is_unchanged = all(
        name in existing.services and not _describe_service_change(spec, existing.services[name], existing)[0]
        for name, spec in desired.services.items()
    )
    if is_unchanged and not ended_run.failed:
        return ""
    return f"the run had {'failed' if ended_run.failed else 'ended'} ({ended_run.why}) and is restarted"


def _plan_creations(object_kind: ObjectKind, desired: Mapping[str, ApiSpec], existing: Mapping[str, object]) -> list[ReconcileStep]:
    return [ReconcileStep(StepVerb.create, object_kind, name, "is new", spec) for name, spec in desired.items() if name not in existing]


def _plan_removals(object_kind: ObjectKind, existing: Mapping[str, str], desired: Mapping[str, ApiSpec]) -> list[ReconcileStep]:
    unused = {name: object_id for name, object_id in sorted(existing.items()) if name not in desired}
    return [ReconcileStep(StepVerb.remove, object_kind, name, "is no longer used", id=object_id) for name, object_id in unused.items()]


def _plan_service_steps(desired: StackSpecs, existing: StackState, restart_cause: str) -> list[ReconcileStep]:
    steps = []
    for name, spec in desired.services.items():
        service = existing.services.get(name)
        if service is None:
            steps.append(ReconcileStep(StepVerb.create, ObjectKind.service, name, "is new", spec))
            continue
        cause, restarts = _describe_service_change(spec, service, existing)
        if restart_cause or cause:
            new = _set_force_update(spec, service, increment=bool(restart_cause))
            interrupts = restarts and not restart_cause and service.replicas > 0
            steps.append(
                ReconcileStep(
                    StepVerb.update,
                    ObjectKind.service,
                    name,
                    cause or restart_cause,
                    new,
                    service,
                    service.id,
                    restarts or bool(restart_cause),
                    interrupts,
                )
            )
    for name, service in existing.services.items():
        if name not in desired.services:
            steps.append(ReconcileStep(StepVerb.remove, ObjectKind.service, name, "is not in the plan", service=service, id=service.id))
    return steps


def _set_force_update(spec: ApiSpec, service: Service, *, increment: bool) -> ApiSpec:
    """Return `spec` with the service's ForceUpdate count, plus 1 if `increment`: a changed count makes Swarm restart the tasks."""
    count = int(service.spec["TaskTemplate"].get("ForceUpdate", 0)) + int(increment)
    return {**spec, "TaskTemplate": {**spec["TaskTemplate"], "ForceUpdate": count}} if count else spec


def _describe_service_change(spec: ApiSpec, service: Service, existing: StackState) -> tuple[str, bool]:
    """Return a description of the difference between `spec` and `service` for the user, and whether the change replaces the container."""
    new, old = canonicalize_spec(spec, existing.network_ids), canonicalize_spec(service.spec, existing.network_ids)
    paths = _find_spec_differences(new, old, "")
    if not paths:
        return "", False
    restarts = any(new.get(key) != old.get(key) for key in ("TaskTemplate", "Replicas"))
    formatted = [_format_difference(*path) for path in paths[:_MAX_SHOWN_CHANGES]]
    overflow = [f"and {len(paths) - _MAX_SHOWN_CHANGES} more"] if len(paths) > _MAX_SHOWN_CHANGES else []
    return ", ".join([*formatted, *overflow]) + (" (restarts it)" if restarts and old["Replicas"] else ""), restarts


def canonicalize_spec(spec: Mapping[str, Any], network_ids: Mapping[str, str]) -> dict[str, Any]:
    """Return a service's spec for comparison: with network names, without the engine's defaults, the ForceUpdate count and empty values."""
    canonical_spec: dict[str, Any] = _strip_defaults(spec)
    canonical_spec["Replicas"] = canonical_spec.pop("Mode", {}).get("Replicated", {}).get("Replicas", 0)
    task = canonical_spec.get("TaskTemplate", {})
    task.pop("ForceUpdate", None)
    for network in task.get("Networks", []):
        network["Target"] = network_ids.get(network["Target"], network["Target"])
    task.get("Networks", []).sort(key=lambda network: network["Target"])
    container = task.get("ContainerSpec", {})
    if "Env" in container:
        # As a mapping: in a list, a changed variable would be two differences, one removed and one added entry.
        container["Env"] = dict(item.partition("=")[::2] for item in container["Env"])
    return canonical_spec


def _strip_defaults(spec_value: Any) -> Any:
    if isinstance(spec_value, Mapping):
        cleaned = {
            key: _strip_defaults(item)
            for key, item in spec_value.items()
            if key not in ("ConfigID", "SecretID") and _ENGINE_DEFAULTS.get(key) != item
        }
        return {key: item for key, item in cleaned.items() if item not in (None, "", 0, [], {})}
    return [_strip_defaults(item) for item in spec_value] if isinstance(spec_value, list) else spec_value


def _find_spec_differences(new_value: Any, old_value: Any, key_path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(new_value, dict) and isinstance(old_value, dict):
        keys = [*new_value, *(key for key in old_value if key not in new_value)]
        return [
            difference
            for key in keys
            for difference in _find_spec_differences(new_value.get(key), old_value.get(key), f"{key_path}.{key}" if key_path else key)
        ]
    return [] if new_value == old_value else [(key_path, old_value, new_value)]


def _format_difference(key_path: str, old_value: Any, new_value: Any) -> str:
    short_path = key_path.removeprefix("TaskTemplate.").removeprefix("ContainerSpec.")
    return f"{short_path} {_format_spec_value(old_value)} → {_format_spec_value(new_value)}"


def _format_spec_value(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        names = [str(item.get("ConfigName") or item.get("SecretName") or item.get("Target") or item) for item in value]
        value = " ".join(names)
    text = str(value)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 1]}…"


def check_networks(desired: StackSpecs, existing: StackState) -> None:
    """Check that existing networks match the desired ones, that external ones exist, and that the subnets of new ones are free.

    Swarm cannot change a network in place, and leaves the tasks of a network whose subnet is taken pending without an error. Raises
    StackError if a check fails.
    """
    for name, spec in desired.networks.items():
        network = existing.networks.get(name)
        if network is not None and (option_changes := find_network_changes(spec, network)):
            raise StackError(
                f"exists with different options ({'; '.join(option_changes)}), and Swarm cannot change a network in place",
                place=f"network {name}",
                hint=f"swarmtrain down {desired.stack}, then deploy again: training resumes from its newest checkpoint",
            )
        if network is None:
            _check_subnets_free(desired.stack, name, spec, existing)
    for name in desired.external_networks:
        if name not in existing.network_ids.values():
            _raise_network_error(name, "does not exist in this swarm", f"docker network create --driver overlay {name}")
        if name in existing.local_networks and name not in _BUILTIN_NETWORKS:
            _raise_network_error(
                name, "is local to this engine, but services need a swarm network", "docker network create --driver overlay NAME"
            )


def _check_subnets_free(run: str, name: str, spec: ApiSpec, existing: StackState) -> None:
    for subnet in map(IPv4Network, _list_subnets(spec.get("IPAM") or {})):
        for other_name, other_subnets in existing.swarm_subnets.items():
            if overlapping := [other for other in other_subnets if other_name != name and subnet.overlaps(IPv4Network(other))]:
                taken = [taken_subnet for subnets in existing.swarm_subnets.values() for taken_subnet in subnets]
                free_subnet = suggest_subnet(run, subnet.prefixlen, taken) or "a free one"
                raise StackError(
                    f"its subnet {subnet} overlaps with {overlapping[0]}, the subnet of the network {other_name}",
                    place=f"network {name}",
                    hint=f"set runner.swarm.subnet: {free_subnet}",
                )


def _raise_network_error(name: str, reason: str, hint: str) -> NoReturn:
    raise StackError(reason, place=f"config runner.swarm.network: {name}", hint=hint)


def find_network_changes(spec: ApiSpec, network: Mapping[str, Any]) -> list[str]:
    """Return a description of each option of `spec` that differs from `network`. Subnets are compared only if `spec` contains them."""
    options = {key: value for key, value in (network.get("Options") or {}).items() if key != _VXLAN_IDS_OPTION}
    pairs = [(key, network.get(key), spec[key]) for key in ("Driver", "Internal", "Attachable")]
    pairs += [(key, options.get(key), spec["Options"].get(key)) for key in sorted({*options, *spec["Options"]})]
    if "IPAM" in spec:
        pairs.append(("Subnet", _list_subnets(network.get("IPAM") or {}), _list_subnets(spec["IPAM"])))
    return [f"{key} {_format_spec_value(old)}, expected {_format_spec_value(new)}" for key, old, new in pairs if old != new]


def _list_subnets(ipam: Mapping[str, Any]) -> list[str]:
    return [item["Subnet"] for item in ipam.get("Config") or []]
