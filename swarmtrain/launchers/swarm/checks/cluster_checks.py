"""Snapshot of the swarm from its managers, taken without starting containers, and the checks on the swarm itself.

More checks on the same snapshot are in capacity_checks.py. Problems that the launcher's own check reports are not repeated: a missing
image, engine versions with known bugs, undeclared generic resources.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.errors import ImageError
from swarmtrain.images import PinnedImage, pin_image
from swarmtrain.launchers.base import Finding
from swarmtrain.launchers.common.checks import CheckRegistry
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import describe_node_unavailability
from swarmtrain.planning.node_selection import PlannedNode
from swarmtrain.planning.plan import Plan

ApiObject = dict[str, Any]
"""An object as the engine's API returns it."""

_MIN_ENGINE_VERSION = (20, 10)
# Architecture as a node reports it → its name in image platforms. All other names are the same in both.
_IMAGE_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv6l": "arm", "armv7l": "arm", "i386": "386", "i686": "386"}


def get_host_name(node: ApiObject) -> str:
    """Return the host name of the swarm node `node`; its id if it has never reported a host name."""
    return str(node["Description"].get("Hostname") or node["ID"])


def get_machine_address(node: ApiObject) -> str:
    """Return the address that the machine of the swarm node `node` advertises to the others; empty if the swarm does not know it."""
    # Old engines report the leader's own address as 0.0.0.0, so the address in ManagerStatus takes precedence.
    manager_address = (node.get("ManagerStatus") or {}).get("Addr", "").rpartition(":")[0].strip("[]")
    return str(manager_address or node["Status"].get("Addr", ""))


@dataclass(frozen=True)
class ClusterSnapshot:
    """Snapshot of the swarm: the unmodified responses of one manager, and the plan to check (None: only the cluster is checked)."""

    nodes: tuple[ApiObject, ...]
    services: tuple[ApiObject, ...] = ()
    tasks: tuple[ApiObject, ...] = ()
    plan: Plan | None = None
    image: PinnedImage | None = None
    """The plan's image as resolved by its registry; None if unknown."""
    terminating_runs: tuple[str, ...] = field(default=())
    """Names of runs whose removal is incomplete."""
    swarm_subnets: tuple[str, ...] = ()
    """The subnets of the swarm's networks, in CIDR notation."""

    @property
    def platforms(self) -> tuple[tuple[str, str], ...]:
        """(architecture, operating system) pairs for which the plan's image is built; empty if unknown."""
        return self.image.platforms if self.image else ()

    @property
    def managers(self) -> list[ApiObject]:
        return [node for node in self.nodes if node["Spec"]["Role"] == "manager"]

    @property
    def planned_nodes(self) -> list[tuple[ApiObject, PlannedNode]]:
        """The swarm nodes that the plan uses, each with the planned node of the run."""
        return [(node, planned) for node in self.nodes if (planned := self.find_planned_node(node))]

    def find_planned_node(self, node: ApiObject) -> PlannedNode | None:
        """Return the planned node of the run that is pinned to the swarm node `node`; None if no planned node is pinned to it."""
        pins = [f"node.id=={node['ID']}"]
        namesakes = [
            other for other in self.nodes if get_host_name(other) == get_host_name(node) and not describe_node_unavailability(other)
        ]
        if not (describe_node_unavailability(node) and namesakes):  # the host name of a rejoined machine refers to its new node
            pins.append(f"node.hostname=={get_host_name(node)}")
        return next((planned for planned in (self.plan.nodes if self.plan else ()) if planned.constraint in pins), None)

    def get_planned_host(self, node: ApiObject) -> str:
        """Return the host name of the swarm node `node` if the plan uses it, else an empty string."""
        return get_host_name(node) if self.find_planned_node(node) else ""

    def is_node_usable_by_run(self, node: ApiObject) -> bool:
        """Return whether a run may use the swarm node `node`: it is in the plan, or a manager, or there is no plan."""
        return self.plan is None or self.find_planned_node(node) is not None or node in self.managers

    def format_node_reference(self, node: ApiObject) -> str:
        """Return the name of `node` for docker commands: its host name, or its id if two nodes share the host name."""
        return get_host_name(node) if [get_host_name(other) for other in self.nodes].count(get_host_name(node)) == 1 else str(node["ID"])


CHECKS: CheckRegistry[ClusterSnapshot] = CheckRegistry()


def take_snapshot(engine: DockerEngine, plan: Plan | None) -> ClusterSnapshot:
    """Return a snapshot of the cluster for `plan` (None: without a plan), with all requests in parallel.

    Raises EngineError if no manager responds.
    """
    with ThreadPoolExecutor() as pool:
        listings = [pool.submit(engine.list_objects, path) for path in ("/nodes", "/services", "/tasks", "/networks")]
        image = pool.submit(_pin_planned_image, engine, plan)
        terminating_runs = pool.submit(cluster_state.list_terminating_runs, engine)
        nodes, services, tasks, networks = (tuple(listing.result()) for listing in listings)
        ordered = tuple(sorted(nodes, key=lambda node: (cluster_state.build_natural_sort_key(get_host_name(node)), node["ID"])))
        subnets = tuple(subnet for subnets in cluster_state.map_swarm_subnets(networks).values() for subnet in subnets)
        return ClusterSnapshot(ordered, services, tasks, plan, image.result(), tuple(terminating_runs.result()), subnets)


def _pin_planned_image(engine: DockerEngine, plan: Plan | None) -> PinnedImage | None:
    try:
        return pin_image(engine, plan.config.runner.docker_config.docker_container) if plan else None
    except ImageError:  # The launcher's own check reports this problem.
        return None


@CHECKS("quorum", "the managers have a leader, all are reachable, and their number is odd")
def _check_quorum(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    managers, count = snapshot.managers, len(snapshot.managers)
    status = {node["ID"]: node.get("ManagerStatus") or {} for node in managers}
    unreachable = [node for node in managers if status[node["ID"]].get("Reachability", "reachable") != "reachable"]
    if not any(manager_status.get("Leader") for manager_status in status.values()):
        hint = (
            "start the managers that are down; if most are permanently lost, run on a remaining one: docker swarm init --force-new-cluster"
        )
        why = "without a leader, nothing in the swarm can be started, changed or removed"
        yield Finding("swarm", "has no leader", hint, why=why)
    for node in unreachable:
        hint = f"run systemctl start docker on it; if it is permanently lost: docker node demote {snapshot.format_node_reference(node)}"
        why = f"more than half of the {count} managers must be reachable, or nothing in the swarm can be changed"
        yield Finding(f"node {get_host_name(node)}", "is not reachable from the other managers", hint, len(unreachable) * 2 >= count, why)
    if count and count % 2 == 0:
        promoted = next((node for node in snapshot.nodes if node not in managers and not describe_node_unavailability(node)), None)
        demoted = next((node for node in [*unreachable, *managers] if not status[node["ID"]].get("Leader")), managers[-1])
        hint = (
            f"docker node promote {snapshot.format_node_reference(promoted)}"
            if promoted
            else f"docker node demote {snapshot.format_node_reference(demoted)}"
        )
        tolerance = "cannot lose any of them" if count == 2 else f"can lose {count // 2 - 1} of them, as {count - 1} could"
        why = "more than half of the managers must be reachable: with an even number, the last one adds no fault tolerance"
        yield Finding("swarm", f"has {count} managers, and {tolerance}", hint, fatal=False, why=why)


@CHECKS("nodes", "every node is up and accepts tasks")
def _check_node_availability(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    for node in snapshot.nodes:
        if not (reason := describe_node_unavailability(node)):
            continue
        planned = snapshot.find_planned_node(node)
        hint = (
            "run systemctl start docker on it, and check that docker node ls shows it as ready; if it is permanently lost: "
            f"{_build_removal_command(node)}"
        )
        if reason in ("drained", "paused"):
            hint = f"docker node update --availability active {snapshot.format_node_reference(node)}"
        elif reason == cluster_state.UNKNOWN_STATE:
            hint = cluster_state.NEW_LEADER_HINT
        why = f"the run's {planned.name} is pinned to this machine, and waits for it" if planned else "no run is scheduled on this machine"
        yield Finding(f"node {get_host_name(node)}", f"is {reason}", hint, planned is not None, why, host=snapshot.get_planned_host(node))


@CHECKS("hostnames", "no two nodes have the same host name")
def _check_host_names(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    for name, count in Counter(get_host_name(node) for node in snapshot.nodes).items():
        if count == 1:
            continue
        same_name_nodes = [node for node in snapshot.nodes if get_host_name(node) == name]
        down_nodes = [node for node in same_name_nodes if node["Status"]["State"] == "down"]
        hint = "find them with docker node ls; on one of them, run hostnamectl set-hostname NEW_NAME, then systemctl restart docker"
        if down_nodes and len(down_nodes) < count:
            hint = f"if they are one machine that has joined twice: {', then '.join(map(_build_removal_command, down_nodes))}"
        pinned = [node for node, planned in snapshot.planned_nodes if planned.constraint == f"node.hostname=={name}"]
        ids = ", ".join(node["ID"] for node in same_name_nodes)
        why = "a service that is pinned by host name may start on any of them, and on a different one after each restart"
        yield Finding(f"node {name}", f"{count} nodes have this host name; their IDs: {ids}", hint, len(pinned) > 1, why)


@CHECKS("versions", "all engines are recent enough and have the same version")
def _check_engine_versions(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    hosts_by_version: dict[tuple[int, ...], list[str]] = {}
    for node in snapshot.nodes:
        text = node["Description"].get("Engine", {}).get("EngineVersion", "")
        version = tuple(int(number) for number in re.findall(r"\d+", text)[:2])
        if version:
            hosts_by_version.setdefault(version, []).append(get_host_name(node))
        if version and version < _MIN_ENGINE_VERSION:
            why = "older engines silently ignore settings that the run's services need"
            hint = "install a newer Docker on it: https://docs.docker.com/engine/install"
            yield Finding(
                f"node {get_host_name(node)}",
                f"engine {text} is older than 20.10",
                hint,
                snapshot.is_node_usable_by_run(node),
                why,
                host=snapshot.get_planned_host(node),
            )
    if len(hosts_by_version) > 1:
        versions = "; ".join(
            f"{'.'.join(map(str, version))} on {', '.join(hosts_by_version[version])}" for version in sorted(hosts_by_version)
        )
        hint = "update one node at a time: docker node update --availability drain NODE, update its engine, then --availability active NODE"
        why = "engines of different versions accept different settings and fail in different ways"
        yield Finding("swarm", f"its engines have different versions: {versions}", hint, fatal=False, why=why)


@CHECKS("platforms", "the image is built for the platforms of the nodes")
def _check_platforms(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    if snapshot.plan is None:
        platform_counts = Counter(node_platform for node in snapshot.nodes if (node_platform := _get_platform(node)))
        if len(platform_counts) > 1:
            counts_text = ", ".join(
                f"{count} {_format_platform(platform_name)}" for platform_name, count in sorted(platform_counts.items())
            )
            hint = f"docker buildx build --platform {','.join(map(_format_platform, sorted(platform_counts)))} --tag IMAGE --push ."
            why = "an image built for one CPU architecture does not start on another"
            yield Finding("swarm", f"its nodes have different platforms: {counts_text}", hint, fatal=False, why=why)
        return
    image = snapshot.plan.config.runner.docker_config.docker_container
    image_platforms = [_format_platform(platform) for platform in snapshot.platforms]
    for node, planned in snapshot.planned_nodes:
        if (node_platform := _get_platform(node)) and not _can_run_image(node, snapshot.platforms):
            platform_name = _format_platform(node_platform)
            hint = (
                f"docker buildx build --platform {','.join([*image_platforms, platform_name])} "
                f"--tag {image} --push ., or use other machines in runner.hosts"
            )
            why = f"the run's {planned.name} would wait forever, or exit as soon as it starts"
            yield Finding(
                f"node {get_host_name(node)}",
                f"is {platform_name}, and the image {image} is built for {', '.join(image_platforms)}",
                hint,
                why=why,
                host=get_host_name(node),
            )
    if snapshot.managers and not any(_can_run_image(node, snapshot.platforms) for node in snapshot.managers):
        hint = (
            "promote a node whose platform the image supports (docker node promote NODE), or build the image for the managers' platform too"
        )
        why = "the rendezvous runs on a manager, and no node can train without it"
        message = f"runs on a manager, but the image {image} is built for no manager's platform, only for: {', '.join(image_platforms)}"
        yield Finding("rendezvous", message, hint, why=why)


@CHECKS("addresses", "every node advertises an address that the others can reach")
def _check_advertised_addresses(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    for node in snapshot.nodes:
        address = get_machine_address(node)
        if not _is_unreachable_address(address):
            continue
        alone = len(snapshot.nodes) == 1
        hint = "docker swarm leave --force (this stops everything in the swarm), then docker swarm init --advertise-addr ITS_ADDRESS"
        if not alone:
            leave = "docker swarm leave --force" if node in snapshot.managers else "docker swarm leave"
            hint = f"on it: {leave}, then docker swarm join --advertise-addr ITS_ADDRESS --token TOKEN MANAGER:2377"
        why = "nodes reach each other's containers through this address, but on each node it refers to a different machine or to none"
        yield Finding(
            f"node {get_host_name(node)}",
            f"advertises {address}, an address that other nodes cannot reach",
            hint,
            not alone and snapshot.is_node_usable_by_run(node),
            why,
            host=snapshot.get_planned_host(node),
        )


@CHECKS("leftovers", "no run is partially removed")
def _check_partially_removed_runs(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    for run in snapshot.terminating_runs:
        why = "its remaining objects keep its name, and may keep its network and its GPUs"
        yield Finding(f"run {run}", "is being removed, or was only partially created", f"swarmtrain down {run}", fatal=False, why=why)


def _build_removal_command(node: ApiObject) -> str:
    """Return the docker command that removes the lost node `node` from the swarm; a manager must be demoted first."""
    removal = f"docker node rm --force {node['ID']}"
    return f"docker node demote {node['ID']} && {removal}" if node["Spec"]["Role"] == "manager" else removal


def _get_platform(node: ApiObject) -> tuple[str, str] | None:
    """Return the node's (architecture, operating system) in the names that images use; None if the node has not reported them."""
    platform = node["Description"].get("Platform", {})
    machine, system = platform.get("Architecture", ""), platform.get("OS", "")
    return (_IMAGE_ARCHITECTURES.get(machine, machine), system) if machine and system else None


def _can_run_image(node: ApiObject, platforms: tuple[tuple[str, str], ...]) -> bool:
    node_platform = _get_platform(node)
    return node_platform is None or not platforms or node_platform in platforms


def _format_platform(platform: tuple[str, str]) -> str:
    """Return (architecture, operating system) in the format of docker's --platform."""
    return f"{platform[1]}/{platform[0]}"


def _is_unreachable_address(address: str) -> bool:
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # the address is a host name, or not known yet
        return False
    return ip.is_loopback or ip.is_unspecified
