"""The engines of the lab's machines: a service of each, and the swarm that they form."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from swarmtrain.errors import LabError
from swarmtrain.lab import api, machines, registry
from swarmtrain.lab.state import Description

# Far from the fabric's 10.77.0.0/16 and from most offices' 10.0.0.0/16: what is on the overlay is never taken for what is outside.
_OVERLAY_POOL = "10.128.0.0/9"
# Where docker looks by itself: on the machine, this is the machine's own engine.
OWN_SOCKET = "unix:///var/run/docker.sock"
# dockerd gives its containerd 15 s, less than a busy disk may take to read it; by the second time it has been read.
_IMPATIENT = "timeout waiting for containerd to start"


def engine_socket(directory: Path, node: str) -> Path:
    """Return the path of the node's Docker socket, which can be used from outside its namespaces."""
    return directory / node / "docker.sock"


def service(directory: Path, description: Description, node: str) -> str:
    """Write the engine's settings, which a bare lab leaves to its owner, and return the script that runs it."""
    home = directory / node
    (home / "etc").mkdir()
    (home / "data").mkdir(mode=0o711)
    if settings := _settings(description, node):
        (home / "etc" / "daemon.json").write_text(json.dumps(settings, indent=2) + "\n")
    return (
        f"rm -f {shlex.quote(str(engine_socket(directory, node)))}\nexec {shlex.join(['dockerd', *_flags(directory, description, node)])}\n"
    )


def _settings(description: Description, node: str) -> dict[str, list[str]]:
    settings = {} if description.bare else {"insecure-registries": [registry.REGISTRY]}
    if gpus := description.gpu_ids(node):
        settings["node-generic-resources"] = [f"NVIDIA-GPU={gpu}" for gpu in gpus]
    return settings


def wait_until_up(directory: Path, node: str, *, seconds: float = 60) -> dict[str, Any]:
    """Return what the node's engine says of itself (`/info`) once it answers.

    Raises LabError with the end of its log if it dies, or does not answer within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        alive = machines.machine(directory, node).pid is not None
        try:
            info: dict[str, Any] = api.request(engine_socket(directory, node), "GET", "/info", timeout=seconds)
            return info
        except OSError:
            if not alive or time.monotonic() > deadline:
                what = "does not answer" if alive else "has died"
                raise LabError(f"the engine {what}:\n{machines.said(directory, node, 'engine')}", place=node) from None
        time.sleep(0.02)


def wait_until_all_up(directory: Path, description: Description) -> None:
    """Return when all engines answer. Raises LabError with the log of one that does not."""
    with ThreadPoolExecutor(len(description.nodes)) as pool:
        list(pool.map(lambda node: _wait_or_boot_again(directory, description, node), description.nodes))


def _wait_or_boot_again(directory: Path, description: Description, node: str) -> None:
    try:
        wait_until_up(directory, node)
    except LabError as error:
        if _IMPATIENT not in error.message:
            raise
        machines.power_off(directory, description, node)
        machines.boot(directory, description, node)
        wait_until_up(directory, node)


def form_swarm(directory: Path, description: Description) -> None:
    """Make the first of the running engines the manager of a swarm, and have the others join it. Raises LabError."""
    first, *others = description.nodes
    with ThreadPoolExecutor(len(description.nodes)) as pool:
        manager = engine_socket(directory, first)
        listen = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": description.address(first)}
        api.request(manager, "POST", "/swarm/init", {**listen, "DefaultAddrPool": [_OVERLAY_POOL], "SubnetSize": 24})
        token = api.request(manager, "GET", "/swarm")["JoinTokens"]["Worker"]
        list(pool.map(lambda node: _join(directory, description, node, token), others))
    wait_until_ready(directory, description, description.nodes)


def wait_until_ready(directory: Path, description: Description, nodes: Iterable[str], *, seconds: float = 60) -> None:
    """Return once the manager counts all `nodes` as ready. Raises LabError naming those that it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while missing := set(nodes) - _ready(engine_socket(directory, description.nodes[0])):
        if time.monotonic() > deadline:
            raise LabError(f"not ready in the swarm after {seconds:g} s", place=", ".join(sorted(missing)), hint="swarmtrain lab status")
        time.sleep(0.05)


def _join(directory: Path, description: Description, node: str, token: str) -> None:
    manager = f"{description.address(description.nodes[0])}:2377"
    listen = {"ListenAddr": "0.0.0.0:2377", "AdvertiseAddr": description.address(node)}
    api.request(engine_socket(directory, node), "POST", "/swarm/join", {**listen, "RemoteAddrs": [manager], "JoinToken": token})


def _ready(manager: Path) -> set[str]:
    try:
        members = api.request(manager, "GET", "/nodes")
    except (OSError, LabError):  # a manager that was just booted has no leader for a moment
        return set()
    return {member["Description"]["Hostname"] for member in members if member["Status"]["State"] == "ready"}


def _flags(directory: Path, description: Description, node: str) -> list[str]:
    """Return the engine's flags: what makes it one of several on this machine. The rest is for its daemon.json."""
    return [
        f"--host=unix://{engine_socket(directory, node)}",
        f"--host={OWN_SOCKET}",
        f"--data-root={directory / node / 'data'}",
        "--exec-root=/run/docker",
        f"--cgroup-parent={machines.cgroup(description.name, node)}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--log-level=warn",
    ]
