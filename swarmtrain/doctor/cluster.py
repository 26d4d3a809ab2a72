"""What the managers can tell without starting anything: one look at the swarm, and the checks on the swarm itself.

More checks on the same value are in capacity.py. What the launcher's own check tells is not told here again: a missing image,
engine versions that are bad for GPUs or images, generic resources that a node does not declare.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.doctor.checks import Checks
from swarmtrain.errors import ImageError
from swarmtrain.images import Pinned, pin
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe
from swarmtrain.plan import Plan, PlannedNode

Raw = dict[str, Any]
"""An object as the engine's API gives it."""

_OLDEST = (20, 10)
# What a node calls its architecture, and what an image calls the same; other names are alike.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv6l": "arm", "armv7l": "arm", "i386": "386", "i686": "386"}


def host(node: Raw) -> str:
    """Return the host name of `node`, or its id if it has never told it."""
    return str(node["Description"].get("Hostname") or node["ID"])


@dataclass(frozen=True)
class Cluster:
    """What one manager answered, as it answered it, and the plan that is to run (None: the cluster is looked at as such)."""

    nodes: tuple[Raw, ...]
    services: tuple[Raw, ...] = ()
    tasks: tuple[Raw, ...] = ()
    plan: Plan | None = None
    image: Pinned | None = None
    """The plan's image as its registry has it; None if nobody knows."""
    leaving: tuple[str, ...] = field(default=())
    """Runs that are half removed."""

    @property
    def platforms(self) -> tuple[tuple[str, str], ...]:
        """(architecture, operating system) that the plan's image is made for; empty if nobody knows."""
        return self.image.platforms if self.image else ()

    @property
    def managers(self) -> list[Raw]:
        return [node for node in self.nodes if node["Spec"]["Role"] == "manager"]

    @property
    def used(self) -> list[tuple[Raw, PlannedNode]]:
        """The machines that the plan uses, each with the run's node there."""
        return [(node, planned) for node in self.nodes if (planned := self.planned(node))]

    def planned(self, node: Raw) -> PlannedNode | None:
        """Return the run's node that is pinned to `node`."""
        pins = [f"node.id=={node['ID']}"]
        namesakes = [other for other in self.nodes if host(other) == host(node) and not _unavailable(other)]
        if not (_unavailable(node) and namesakes):  # a machine that has joined again is meant as it is now
            pins.append(f"node.hostname=={host(node)}")
        return next((planned for planned in (self.plan.nodes if self.plan else ()) if planned.constraint in pins), None)

    def matters(self, node: Raw) -> bool:
        """Say whether a run may come to use `node`: the plan does, the rendezvous may, or there is no plan."""
        return self.plan is None or self.planned(node) is not None or node in self.managers

    def handle(self, node: Raw) -> str:
        """Return what a docker command takes for `node`: its host name, or its id where two nodes share the name."""
        return host(node) if [host(other) for other in self.nodes].count(host(node)) == 1 else str(node["ID"])


CHECKS: Checks[Cluster] = Checks()


def look(engine: Engine, plan: Plan | None) -> Cluster:
    """Ask the managers what there is, all questions side by side, for `plan` or as such. Raises EngineError."""
    with ThreadPoolExecutor() as pool:
        listings = [pool.submit(engine.listing, path) for path in ("/nodes", "/services", "/tasks")]
        image = pool.submit(_image, engine, plan)
        leaving = pool.submit(observe.leaving, engine)
        nodes, services, tasks = (tuple(listing.result()) for listing in listings)
        ordered = tuple(sorted(nodes, key=lambda node: (observe.natural(host(node)), node["ID"])))
        return Cluster(ordered, services, tasks, plan, image.result(), tuple(leaving.result()))


def _image(engine: Engine, plan: Plan | None) -> Pinned | None:
    try:
        return pin(engine, plan.config.runner.docker_config.docker_container) if plan else None
    except ImageError:  # which the launcher's own check tells
        return None


@CHECKS("quorum", "one manager leads, the others answer it, and their number is odd")
def _quorum(seen: Cluster) -> Iterator[Finding]:
    managers, count = seen.managers, len(seen.managers)
    status = {node["ID"]: node.get("ManagerStatus") or {} for node in managers}
    silent = [node for node in managers if status[node["ID"]].get("Reachability", "reachable") != "reachable"]
    if not any(each.get("Leader") for each in status.values()):
        hint = "start the managers that are down; if most are lost for good, on one that is left: docker swarm init --force-new-cluster"
        why = "without a leader nothing on the swarm can be started, changed or removed"
        yield Finding("swarm", "none of its managers leads", hint, why=why)
    for node in silent:
        hint = f"systemctl start docker on it; if it is lost for good: docker node demote {seen.handle(node)}"
        why = f"more than half of the {count} managers must answer, or nothing on the swarm can be changed"
        yield Finding(f"node {host(node)}", "the other managers do not reach this manager", hint, len(silent) * 2 >= count, why)
    if count and count % 2 == 0:
        promoted = next((node for node in seen.nodes if node not in managers and not _unavailable(node)), None)
        demoted = next((node for node in [*silent, *managers] if not status[node["ID"]].get("Leader")), managers[-1])
        hint = f"docker node promote {seen.handle(promoted)}" if promoted else f"docker node demote {seen.handle(demoted)}"
        borne = "can lose none of them" if count == 2 else f"can lose {count // 2 - 1} of them, as {count - 1} could"
        why = "more than half of the managers must answer: the last one of an even number is one more to lose, and adds nothing"
        yield Finding("swarm", f"has {count} managers, and {borne}", hint, fatal=False, why=why)


@CHECKS("nodes", "every node is up and takes containers")
def _nodes(seen: Cluster) -> Iterator[Finding]:
    for node in seen.nodes:
        if not (reason := _unavailable(node)):
            continue
        planned = seen.planned(node)
        hint = f"systemctl start docker on it, until docker node ls shows it ready; if it is lost for good: {_forget(node)}"
        if reason in ("drained", "paused"):
            hint = f"docker node update --availability active {seen.handle(node)}"
        why = f"the run's {planned.name} is pinned to this machine, and waits for it" if planned else "no run is given this machine"
        yield Finding(f"node {host(node)}", f"is {reason}", hint, planned is not None, why)


@CHECKS("hostnames", "no two nodes have one host name")
def _hostnames(seen: Cluster) -> Iterator[Finding]:
    for name, count in Counter(host(node) for node in seen.nodes).items():
        if count == 1:
            continue
        called = [node for node in seen.nodes if host(node) == name]
        down = [node for node in called if node["Status"]["State"] == "down"]
        hint = "docker node ls shows them; on one of them: hostnamectl set-hostname NEW_NAME, then systemctl restart docker"
        if down and len(down) < count:
            hint = f"if this is one machine that has joined again: {', then '.join(map(_forget, down))}"
        pinned = [node for node, planned in seen.used if planned.constraint == f"node.hostname=={name}"]
        ids = ", ".join(node["ID"] for node in called)
        why = "what is placed by its host name may start on any of them, and on another one after each restart"
        yield Finding(f"node {name}", f"{count} nodes have this host name, with the ids {ids}", hint, len(pinned) > 1, why)


@CHECKS("versions", "all engines are recent enough, and of one version")
def _versions(seen: Cluster) -> Iterator[Finding]:
    found: dict[tuple[int, ...], list[str]] = {}
    for node in seen.nodes:
        text = node["Description"].get("Engine", {}).get("EngineVersion", "")
        version = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
        if version:
            found.setdefault(version, []).append(host(node))
        if version and version < _OLDEST:
            why = "older engines lack what the run's services need, and leave it out without a word"
            hint = "install a newer Docker on it: https://docs.docker.com/engine/install"
            yield Finding(f"node {host(node)}", f"engine {text} is older than 20.10", hint, seen.matters(node), why)
    if len(found) > 1:
        versions = "; ".join(f"{'.'.join(map(str, version))} on {', '.join(found[version])}" for version in sorted(found))
        hint = "one node after the other: docker node update --availability drain NODE, update its engine, then --availability active NODE"
        why = "engines of different versions differ in what they accept and in how they fail, so that a run's nodes are not alike"
        yield Finding("swarm", f"its engines are of different versions: {versions}", hint, fatal=False, why=why)


@CHECKS("platforms", "the image is made for the processors of the nodes")
def _platforms(seen: Cluster) -> Iterator[Finding]:
    if seen.plan is None:
        kinds = Counter(machine for node in seen.nodes if (machine := _platform(node)))
        if len(kinds) > 1:
            there = ", ".join(f"{count} {_slashed(kind)}" for kind, count in sorted(kinds.items()))
            hint = f"docker buildx build --platform {','.join(map(_slashed, sorted(kinds)))} --tag IMAGE --push ."
            why = "an image that is made for one kind of processor does not start on the others"
            yield Finding("swarm", f"its nodes are of several kinds: {there}", hint, fatal=False, why=why)
        return
    image = seen.plan.config.runner.docker_config.docker_container
    made = [_slashed(platform) for platform in seen.platforms]
    for node, planned in seen.used:
        if (machine := _platform(node)) and not _fits(node, seen.platforms):
            kind = _slashed(machine)
            hint = f"docker buildx build --platform {','.join([*made, kind])} --tag {image} --push ., or other machines in runner.hosts"
            why = f"the run's {planned.name} would wait for ever, or end as soon as it starts"
            yield Finding(f"node {host(node)}", f"is {kind}, and the image {image} is made for {', '.join(made)}", hint, why=why)
    if seen.managers and not any(_fits(node, seen.platforms) for node in seen.managers):
        hint = "docker node promote NODE, for a node that the image is made for, or build it for the managers too"
        why = "the rendezvous runs on a manager, and no node of the run trains without it"
        message = f"it runs on a manager, and the image {image} is made for none of them: {', '.join(made)}"
        yield Finding("rendezvous", message, hint, why=why)


@CHECKS("addresses", "every node is known by an address that the others can reach")
def _addresses(seen: Cluster) -> Iterator[Finding]:
    for node in seen.nodes:
        # Old engines show a leader's own address as 0.0.0.0; what counts for a manager is what it told the others.
        manager = (node.get("ManagerStatus") or {}).get("Addr", "").rpartition(":")[0].strip("[]")
        address = manager or node["Status"].get("Addr", "")
        if not _unreachable(address):
            continue
        alone = len(seen.nodes) == 1
        hint = "docker swarm leave --force, which ends all that runs on the swarm, then docker swarm init --advertise-addr ITS_ADDRESS"
        if not alone:
            leave = "docker swarm leave --force" if manager else "docker swarm leave"
            hint = f"on it: {leave}, then docker swarm join --advertise-addr ITS_ADDRESS --token TOKEN MANAGER:2377"
        why = "nodes reach each other's containers by this address, and it means another machine, or none, on each of them"
        yield Finding(f"node {host(node)}", f"has the address {address} in the swarm", hint, not alone and seen.matters(node), why)


@CHECKS("leftovers", "no run is half removed")
def _leftovers(seen: Cluster) -> Iterator[Finding]:
    for run in seen.leaving:
        why = "what is left of it keeps its name, and may keep its network and its GPUs"
        yield Finding(f"run {run}", "is going down, or was left half made", f"swarmtrain down {run}", fatal=False, why=why)


def _unavailable(node: Raw) -> str:
    if node["Status"]["State"] != "ready":
        return str(node["Status"]["State"])
    return {"drain": "drained", "pause": "paused"}.get(node["Spec"]["Availability"], "")


def _forget(node: Raw) -> str:
    """Return the command that removes a node that is lost; a manager must be demoted first."""
    removal = f"docker node rm --force {node['ID']}"
    return f"docker node demote {node['ID']} && {removal}" if node["Spec"]["Role"] == "manager" else removal


def _platform(node: Raw) -> tuple[str, str] | None:
    """Return the node's (architecture, operating system) in the words of images, or None if it has not told them."""
    platform = node["Description"].get("Platform", {})
    machine, system = platform.get("Architecture", ""), platform.get("OS", "")
    return (_ARCHITECTURES.get(machine, machine), system) if machine and system else None


def _fits(node: Raw, platforms: tuple[tuple[str, str], ...]) -> bool:
    machine = _platform(node)
    return machine is None or not platforms or machine in platforms


def _slashed(platform: tuple[str, str]) -> str:
    """Write (architecture, operating system) as docker's --platform does."""
    return f"{platform[1]}/{platform[0]}"


def _unreachable(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a name, or nothing yet
        return False
    return found.is_loopback or found.is_unspecified
