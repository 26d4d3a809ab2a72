"""What is wanted against what is there → the steps between them, each with its cause. Values in, values out.

Services are compared as `docker stack deploy` would leave them: ids stand for names, and what the engine fills in by
itself counts as absent. So a stack that plain `docker stack deploy` started is as good as one of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from swarmtrain.errors import StackError
from swarmtrain.launchers.swarm.observe import Observed, Service
from swarmtrain.launchers.swarm.specs import Spec, Specs

# What the engine writes into a stored spec by itself.
_DEFAULTS = {"Runtime": "container", "Isolation": "default"}
# Networks of the engine itself that services can be in.
_EVERYWHERE = ("host", "bridge", "none")
_OVERLAY_INTERNAL = "com.docker.network.driver.overlay.vxlanid_list"
_SHOWN_CHANGES = 3
_SHOWN_CHARACTERS = 60


class Kind(StrEnum):
    """What a step is about, in the words of the docker command line."""

    network = "network"
    secret = "secret"  # noqa: S105  # the object's kind
    config = "config"
    service = "service"


class Verb(StrEnum):
    """What a step does."""

    create = "create"
    update = "update"
    remove = "remove"


@dataclass(frozen=True)
class Step:
    """One request to the engine, and why. `restarts` says that containers are replaced, `interrupts` that these run."""

    verb: Verb
    kind: Kind
    name: str
    cause: str
    spec: Spec | None = None
    service: Service | None = None
    id: str = ""
    restarts: bool = False
    interrupts: bool = False

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.name}: {self.cause}"


@dataclass(frozen=True)
class Ended:
    """The board has spoken its verdict and is gone: nothing runs until it is started again."""

    failed: bool
    why: str


def reconcile(wanted: Specs, there: Observed, ended: Ended | None = None) -> list[Step]:
    """Return the steps that make `there` what is `wanted`, in order; none if it is already.

    A run that has `ended` is started again as a whole if it failed, or if anything about it changes.
    Raises StackError for a network that would have to be changed in place, which Swarm cannot do.
    """
    check_networks(wanted, there)
    again = _why_again(wanted, there, ended)
    return [
        *_create(Kind.config, wanted.configs, there.configs),
        *_create(Kind.secret, wanted.secrets, there.secrets),
        *_create(Kind.network, wanted.networks, there.networks),
        *_services(wanted, there, again),
        *_remove(Kind.config, there.configs, wanted.configs),
        *_remove(Kind.secret, there.secrets, wanted.secrets),
    ]


def _why_again(wanted: Specs, there: Observed, ended: Ended | None) -> str:
    if ended is None:
        return ""
    same = all(name in there.services and not _change(spec, there.services[name], there)[0] for name, spec in wanted.services.items())
    if same and not ended.failed:
        return ""
    return f"the run had {'failed' if ended.failed else 'ended'} ({ended.why}) and starts again"


def _create(kind: Kind, wanted: Mapping[str, Spec], there: Mapping[str, object]) -> list[Step]:
    return [Step(Verb.create, kind, name, "is not there", spec) for name, spec in wanted.items() if name not in there]


def _remove(kind: Kind, there: Mapping[str, str], wanted: Mapping[str, Spec]) -> list[Step]:
    unused = {name: found for name, found in sorted(there.items()) if name not in wanted}
    return [Step(Verb.remove, kind, name, "nothing uses it any more", id=found) for name, found in unused.items()]


def _services(wanted: Specs, there: Observed, again: str) -> list[Step]:
    steps = []
    for name, spec in wanted.services.items():
        service = there.services.get(name)
        if service is None:
            steps.append(Step(Verb.create, Kind.service, name, "is not there", spec))
            continue
        cause, restarts = _change(spec, service, there)
        if again or cause:
            new = _with_force(spec, service, more=bool(again))
            runs = restarts and not again and service.replicas > 0
            steps.append(Step(Verb.update, Kind.service, name, cause or again, new, service, service.id, restarts or bool(again), runs))
    for name, service in there.services.items():
        if name not in wanted.services:
            steps.append(Step(Verb.remove, Kind.service, name, "is not in the plan", service=service, id=service.id))
    return steps


def _with_force(spec: Spec, service: Service, *, more: bool) -> Spec:
    """Keep the count of forced restarts: another count would be one more restart."""
    count = int(service.spec["TaskTemplate"].get("ForceUpdate", 0)) + int(more)
    return {**spec, "TaskTemplate": {**spec["TaskTemplate"], "ForceUpdate": count}} if count else spec


def _change(spec: Spec, service: Service, there: Observed) -> tuple[str, bool]:
    """Return what differs, for a person, and whether it replaces the container."""
    new, old = canonical(spec, there.network_ids), canonical(service.spec, there.network_ids)
    paths = _differences(new, old, "")
    if not paths:
        return "", False
    restarts = any(new.get(key) != old.get(key) for key in ("TaskTemplate", "Replicas"))
    shown = [_phrase(*path) for path in paths[:_SHOWN_CHANGES]]
    more = [f"and {len(paths) - _SHOWN_CHANGES} more"] if len(paths) > _SHOWN_CHANGES else []
    return ", ".join([*shown, *more]) + (" (restarts it)" if restarts and old["Replicas"] else ""), restarts


def canonical(spec: Mapping[str, Any], network_ids: Mapping[str, str]) -> dict[str, Any]:
    """Return a service's spec without what says nothing: ids, the engine's defaults, the count of forced restarts, what is empty."""
    plain: dict[str, Any] = _plain(spec)
    plain["Replicas"] = plain.pop("Mode", {}).get("Replicated", {}).get("Replicas", 0)
    task = plain.get("TaskTemplate", {})
    task.pop("ForceUpdate", None)
    for network in task.get("Networks", []):
        network["Target"] = network_ids.get(network["Target"], network["Target"])
    task.get("Networks", []).sort(key=lambda network: network["Target"])
    container = task.get("ContainerSpec", {})
    if "Env" in container:
        # As a mapping, a changed variable is one difference and not two.
        container["Env"] = dict(item.partition("=")[::2] for item in container["Env"])
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        cleaned = {key: _plain(item) for key, item in value.items() if key not in ("ConfigID", "SecretID") and _DEFAULTS.get(key) != item}
        return {key: item for key, item in cleaned.items() if item not in (None, "", 0, [], {})}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _differences(new: Any, old: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(new, dict) and isinstance(old, dict):
        keys = [*new, *(key for key in old if key not in new)]
        return [found for key in keys for found in _differences(new.get(key), old.get(key), f"{path}.{key}" if path else key)]
    return [] if new == old else [(path, old, new)]


def _phrase(path: str, old: Any, new: Any) -> str:
    short = path.removeprefix("TaskTemplate.").removeprefix("ContainerSpec.")
    return f"{short} {_shown(old)} → {_shown(new)}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        names = [str(item.get("ConfigName") or item.get("SecretName") or item.get("Target") or item) for item in value]
        value = " ".join(names)
    text = str(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def check_networks(wanted: Specs, there: Observed) -> None:
    """Raise StackError for a network that would have to be changed in place, or that is not there."""
    for name, spec in wanted.networks.items():
        found = there.networks.get(name)
        if found is not None and (changed := network_changes(spec, found)):
            raise StackError(
                f"it exists with other options ({'; '.join(changed)}), and Swarm cannot change a network in place",
                place=f"network {name}",
                hint=f"swarmtrain down {wanted.stack}, then deploy again: training resumes from its newest checkpoint",
            )
    for name in wanted.external:
        if name not in there.network_ids.values():
            _no_network(name, "it is not on this swarm", f"docker network create --driver overlay {name}")
        if name in there.local and name not in _EVERYWHERE:
            _no_network(
                name, "only this one engine has it, and services need one of the swarm", "docker network create --driver overlay NAME"
            )


def _no_network(name: str, reason: str, hint: str) -> NoReturn:
    raise StackError(reason, place=f"config runner.swarm.network: {name}", hint=hint)


def network_changes(spec: Spec, found: Mapping[str, Any]) -> list[str]:
    """Return the options of a network that are wanted otherwise than `found` has them. Subnets count where they are asked for."""
    options = {key: value for key, value in (found.get("Options") or {}).items() if key != _OVERLAY_INTERNAL}
    pairs = [(key, found.get(key), spec[key]) for key in ("Driver", "Internal", "Attachable")]
    pairs += [(key, options.get(key), spec["Options"].get(key)) for key in sorted({*options, *spec["Options"]})]
    if "IPAM" in spec:
        pairs.append(("Subnet", _subnets(found.get("IPAM") or {}), _subnets(spec["IPAM"])))
    return [f"{key} {_shown(old)}, wanted {_shown(new)}" for key, old, new in pairs if old != new]


def _subnets(ipam: Mapping[str, Any]) -> list[str]:
    return [item["Subnet"] for item in ipam.get("Config") or []]
