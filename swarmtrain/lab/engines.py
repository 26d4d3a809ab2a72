"""The Docker engines of the lab's machines: a service on each machine, and the swarm that they form."""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from swarmtrain.errors import LabError
from swarmtrain.lab import engine_api, machines, registry
from swarmtrain.lab.state import LabDescription
from swarmtrain.process import run_command

# Disjoint from the bridge's 10.77.0.0/16 and from 10.0.0.0/16, which many office networks use, so that overlay addresses never collide.
_OVERLAY_ADDRESS_POOL = "10.128.0.0/9"
# Docker's default socket: on a machine of the lab, this is the machine's own engine.
OWN_SOCKET = "unix:///var/run/docker.sock"
# dockerd waits 15 s for containerd, but loading containerd from a busy disk may take longer. The retry finds it in the page cache.
_CONTAINERD_TIMEOUT_TEXT = "timeout waiting for containerd to start"


def get_engine_socket(lab_folder: Path, node: str) -> Path:
    """Return the path of the node's Docker socket on this machine."""
    return lab_folder / node / "docker.sock"


def build_engine_service(lab_folder: Path, description: LabDescription, node: str) -> str:
    """Write the settings of the node's Docker engine, except in a bare lab, and return the shell script that runs the engine."""
    home = lab_folder / node
    (home / "etc").mkdir()
    (home / "data").mkdir(mode=0o711)
    if settings := _build_daemon_settings(description, node):
        (home / "etc" / "daemon.json").write_text(json.dumps(settings, indent=2) + "\n")
    return (
        f"rm -f {shlex.quote(str(get_engine_socket(lab_folder, node)))}\n"
        f"exec {shlex.join(['dockerd', *_build_dockerd_flags(lab_folder, description, node)])}\n"
    )


def _build_daemon_settings(description: LabDescription, node: str) -> dict[str, list[str]]:
    settings = {} if description.bare else {"insecure-registries": [registry.REGISTRY_ADDRESS]}
    if gpus := description.build_gpu_ids(node):
        settings["node-generic-resources"] = [f"NVIDIA-GPU={gpu}" for gpu in gpus]
    return settings


def wait_until_engine_up(lab_folder: Path, node: str, *, timeout: float = 60) -> dict[str, Any]:
    """Wait until the node's Docker engine answers, and return its info (`/info`).

    Raises LabError with the end of the engine's log if the node dies, or if the engine does not answer within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        alive = machines.get_init_daemon(lab_folder, node).pid is not None
        try:
            info: dict[str, Any] = engine_api.send_request(get_engine_socket(lab_folder, node), "GET", "/info", timeout=timeout)
            return info
        except OSError:
            if not alive or time.monotonic() > deadline:
                problem = "does not answer" if alive else "has exited"
                raise LabError(f"the engine {problem}:\n{machines.read_log_tail(lab_folder, node, 'engine')}", place=node) from None
        time.sleep(0.02)


def wait_until_all_engines_up(lab_folder: Path, description: LabDescription) -> None:
    """Wait until all engines of the lab answer. Raises LabError with the log of an engine that does not answer."""
    with ThreadPoolExecutor(len(description.nodes)) as pool:
        list(pool.map(lambda node: _wait_for_engine_or_reboot(lab_folder, description, node), description.nodes))


def _wait_for_engine_or_reboot(lab_folder: Path, description: LabDescription, node: str) -> None:
    try:
        wait_until_engine_up(lab_folder, node)
    except LabError as error:
        if _CONTAINERD_TIMEOUT_TEXT not in error.message:
            raise
        machines.power_off_node(lab_folder, description, node)
        machines.boot_node(lab_folder, description, node)
        wait_until_engine_up(lab_folder, node)


def create_swarm(lab_folder: Path, description: LabDescription) -> None:
    """Initialize a swarm: the first node becomes the manager, and the other nodes join it. Raises LabError if that fails."""
    first, *other_nodes = description.nodes
    with ThreadPoolExecutor(len(description.nodes)) as pool:
        manager = get_engine_socket(lab_folder, first)
        listen = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": description.get_node_address(first)}
        engine_api.send_request(manager, "POST", "/swarm/init", {**listen, "DefaultAddrPool": [_OVERLAY_ADDRESS_POOL], "SubnetSize": 24})
        token = engine_api.send_request(manager, "GET", "/swarm")["JoinTokens"]["Worker"]
        list(pool.map(lambda node: _join_swarm(lab_folder, description, node, token), other_nodes))
    wait_until_swarm_ready(lab_folder, description, description.nodes)


def wait_until_swarm_ready(lab_folder: Path, description: LabDescription, nodes: Iterable[str], *, timeout: float = 60) -> None:
    """Wait until the swarm's manager reports all `nodes` as ready.

    Raises LabError that names the nodes that are not ready within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while missing := set(nodes) - _list_ready_nodes(get_engine_socket(lab_folder, description.nodes[0])):
        if time.monotonic() > deadline:
            raise LabError(f"not ready in the swarm after {timeout:g} s", place=", ".join(sorted(missing)), hint="swarmtrain lab status")
        time.sleep(0.05)


def copy_image_store(lab_folder: Path, source: str, target: str) -> None:
    """Replace the images and containers of the engine of `target`, which is powered off, by the images of `source`, as hard links.

    This takes seconds, without a registry and a second copy on the disk: engines replace the files of their images, and never modify them.
    """
    for name in list_image_folders(lab_folder, source):
        copy_with_hard_links(get_data_folder(lab_folder, source) / name, get_data_folder(lab_folder, target) / name)


def get_data_folder(lab_folder: Path, node: str) -> Path:
    """Return the folder with the data of the node's engine."""
    return lab_folder / node / "data"


def list_image_folders(lab_folder: Path, node: str) -> list[str]:
    """Return the names of the folders in the data of the node's running engine that have its images."""
    return ["image", str(engine_api.send_request(get_engine_socket(lab_folder, node), "GET", "/info")["Driver"])]


def copy_with_hard_links(source: Path, target: Path) -> None:
    """Replace the folder `target` by a copy of `source` as hard links, without what is mounted in it; on another disk, as a real copy."""
    run_command(["rm", "-rf", str(target)])
    target.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["cp", "-alx", str(source), str(target)], stderr=subprocess.DEVNULL, check=False).returncode:
        run_command(["rm", "-rf", str(target)])
        run_command(["cp", "-ax", str(source), str(target)])


def _join_swarm(lab_folder: Path, description: LabDescription, node: str, join_token: str) -> None:
    manager = f"{description.get_node_address(description.nodes[0])}:2377"
    listen = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": description.get_node_address(node)}
    engine_api.send_request(
        get_engine_socket(lab_folder, node), "POST", "/swarm/join", {**listen, "RemoteAddrs": [manager], "JoinToken": join_token}
    )


def _list_ready_nodes(manager_socket: Path) -> set[str]:
    try:
        members = engine_api.send_request(manager_socket, "GET", "/nodes")
    except (OSError, LabError):  # a manager that has just booted has no leader yet
        return set()
    return {member["Description"]["Hostname"] for member in members if member["Status"]["State"] == "ready"}


def _build_dockerd_flags(lab_folder: Path, description: LabDescription, node: str) -> list[str]:
    """Return the dockerd flags with which the node's engine can run next to other engines on this machine.

    All other settings are in its daemon.json.
    """
    return [
        f"--host=unix://{get_engine_socket(lab_folder, node)}",
        f"--host={OWN_SOCKET}",
        f"--data-root={lab_folder / node / 'data'}",
        "--exec-root=/run/docker",
        f"--cgroup-parent={machines.get_cgroup_name(description.name, node)}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--log-level=warn",
    ]
