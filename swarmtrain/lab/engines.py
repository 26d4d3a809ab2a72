"""The Docker engines of the lab's machines: a service on each machine, and the swarm that they form."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from swarmtrain.errors import LabError
from swarmtrain.lab import engine_api, machines, registry
from swarmtrain.lab.state import LabDescription

# Disjoint from the bridge's 10.77.0.0/16 and from 10.0.0.0/16, which many office networks use, so that overlay addresses never collide.
_OVERLAY_ADDRESS_POOL = "10.128.0.0/9"
# Docker's default socket: on a machine of the lab, this is the machine's own engine.
OWN_SOCKET = "unix:///var/run/docker.sock"
# dockerd waits 15 s for containerd, but loading containerd from a busy disk may take longer. The retry finds it in the page cache.
_CONTAINERD_TIMEOUT_TEXT = "timeout waiting for containerd to start"


def get_engine_socket(directory: Path, node: str) -> Path:
    """Return the path of the node's Docker socket on this machine."""
    return directory / node / "docker.sock"


def build_engine_service(directory: Path, description: LabDescription, node: str) -> str:
    """Write the settings of the node's Docker engine, except in a bare lab, and return the shell script that runs the engine."""
    home = directory / node
    (home / "etc").mkdir()
    (home / "data").mkdir(mode=0o711)
    if settings := _build_daemon_settings(description, node):
        (home / "etc" / "daemon.json").write_text(json.dumps(settings, indent=2) + "\n")
    return (
        f"rm -f {shlex.quote(str(get_engine_socket(directory, node)))}\n"
        f"exec {shlex.join(['dockerd', *_build_dockerd_flags(directory, description, node)])}\n"
    )


def _build_daemon_settings(description: LabDescription, node: str) -> dict[str, list[str]]:
    settings = {} if description.bare else {"insecure-registries": [registry.REGISTRY_ADDRESS]}
    if gpus := description.build_gpu_ids(node):
        settings["node-generic-resources"] = [f"NVIDIA-GPU={gpu}" for gpu in gpus]
    return settings


def wait_until_engine_up(directory: Path, node: str, *, seconds: float = 60) -> dict[str, Any]:
    """Wait until the node's Docker engine answers, and return its info (`/info`).

    Raises LabError with the end of the engine's log if the engine dies, or does not answer within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        alive = machines.get_init_daemon(directory, node).pid is not None
        try:
            info: dict[str, Any] = engine_api.send_request(get_engine_socket(directory, node), "GET", "/info", timeout=seconds)
            return info
        except OSError:
            if not alive or time.monotonic() > deadline:
                problem = "does not answer" if alive else "has died"
                raise LabError(f"the engine {problem}:\n{machines.read_log_tail(directory, node, 'engine')}", place=node) from None
        time.sleep(0.02)


def wait_until_all_engines_up(directory: Path, description: LabDescription) -> None:
    """Wait until all engines of the lab answer. Raises LabError with the log of an engine that does not answer."""
    with ThreadPoolExecutor(len(description.nodes)) as pool:
        list(pool.map(lambda node: _wait_for_engine_or_reboot(directory, description, node), description.nodes))


def _wait_for_engine_or_reboot(directory: Path, description: LabDescription, node: str) -> None:
    try:
        wait_until_engine_up(directory, node)
    except LabError as error:
        if _CONTAINERD_TIMEOUT_TEXT not in error.message:
            raise
        machines.power_off_node(directory, description, node)
        machines.boot_node(directory, description, node)
        wait_until_engine_up(directory, node)


def form_swarm(directory: Path, description: LabDescription) -> None:
    """Initialize a swarm: the first node becomes the manager, and the other nodes join it. Raises LabError if that fails."""
    first, *other_nodes = description.nodes
    with ThreadPoolExecutor(len(description.nodes)) as pool:
        manager = get_engine_socket(directory, first)
        listen = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": description.get_node_address(first)}
        engine_api.send_request(manager, "POST", "/swarm/init", {**listen, "DefaultAddrPool": [_OVERLAY_ADDRESS_POOL], "SubnetSize": 24})
        token = engine_api.send_request(manager, "GET", "/swarm")["JoinTokens"]["Worker"]
        list(pool.map(lambda node: _join_swarm(directory, description, node, token), other_nodes))
    wait_until_swarm_ready(directory, description, description.nodes)


def wait_until_swarm_ready(directory: Path, description: LabDescription, nodes: Iterable[str], *, seconds: float = 60) -> None:
    """Wait until the swarm's manager reports all `nodes` as ready.

    Raises LabError that names the nodes that are not ready within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while missing := set(nodes) - _list_ready_nodes(get_engine_socket(directory, description.nodes[0])):
        if time.monotonic() > deadline:
            raise LabError(f"not ready in the swarm after {seconds:g} s", place=", ".join(sorted(missing)), hint="swarmtrain lab status")
        time.sleep(0.05)


def _join_swarm(directory: Path, description: LabDescription, node: str, token: str) -> None:
    manager = f"{description.get_node_address(description.nodes[0])}:2377"
    listen = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": description.get_node_address(node)}
    engine_api.send_request(
        get_engine_socket(directory, node), "POST", "/swarm/join", {**listen, "RemoteAddrs": [manager], "JoinToken": token}
    )


def _list_ready_nodes(manager: Path) -> set[str]:
    try:
        members = engine_api.send_request(manager, "GET", "/nodes")
    except (OSError, LabError):  # a manager that has just booted has no leader yet
        return set()
    return {member["Description"]["Hostname"] for member in members if member["Status"]["State"] == "ready"}


def _build_dockerd_flags(directory: Path, description: LabDescription, node: str) -> list[str]:
    """Return the dockerd flags with which the node's engine can run next to other engines on this machine.

    All other settings are in its daemon.json.
    """
    return [
        f"--host=unix://{get_engine_socket(directory, node)}",
        f"--host={OWN_SOCKET}",
        f"--data-root={directory / node / 'data'}",
        "--exec-root=/run/docker",
        f"--cgroup-parent={machines.get_cgroup_name(description.name, node)}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--log-level=warn",
    ]
