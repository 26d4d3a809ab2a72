"""The lab's machines: booting one is starting an engine as the only service of a machine of its own, made of namespaces."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from swarmtrain.errors import LabError
from swarmtrain.lab import api, fabric, registry
from swarmtrain.lab.checks import search_path
from swarmtrain.lab.state import Daemon, Description, tail

# Far from the fabric's 10.77.0.0/16 and from most offices' 10.0.0.0/16: what is on the overlay is never taken for what is outside.
_OVERLAY_POOL = "10.128.0.0/9"
_NEW_NAMESPACES = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
# Where docker looks by itself: on the machine, this is the machine's own engine.
OWN_SOCKET = "unix:///var/run/docker.sock"
_CGROUPS = Path("/sys/fs/cgroup")
# dockerd gives its containerd 15 s, less than a busy disk may take to read it; by the second time it has been read.
_IMPATIENT = "timeout waiting for containerd to start"


def machine(directory: Path, node: str) -> Daemon:
    """Return the node's init process; all that runs in the machine lives and dies with it."""
    return Daemon(directory / node / "pid")


def engine_socket(directory: Path, node: str) -> Path:
    """Return the path of the node's Docker socket, which can be used from outside its namespaces."""
    return directory / node / "docker.sock"


def prepare(directory: Path, description: Description, node: str) -> None:
    """Make the disk of a node that has never run: the names it knows and its engine's settings, which a bare lab leaves to its owner."""
    home = directory / node
    (home / "etc").mkdir(parents=True)
    (home / "data").mkdir(mode=0o711)
    known = {description.address(name): name for name in description.nodes} | {description.bridge_address: registry.HOST}
    (home / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in known.items()))
    settings = _settings(description, node)
    if settings:
        (home / "etc" / "daemon.json").write_text(json.dumps(settings, indent=2) + "\n")


def _settings(description: Description, node: str) -> dict[str, list[str]]:
    settings = {} if description.bare else {"insecure-registries": [registry.REGISTRY]}
    if gpus := description.gpu_ids(node):
        settings["node-generic-resources"] = [f"NVIDIA-GPU={gpu}" for gpu in gpus]
    return settings


def boot(directory: Path, description: Description, node: str) -> None:
    """Power the node on; returns as soon as its init runs. Raises LabError if it does not."""
    home = directory / node
    engine_socket(directory, node).unlink(missing_ok=True)
    script = Path(__file__).with_name("machine.sh")
    engine = Path(description.engine) if description.engine else None
    machine(directory, node).spawn(
        ["sh", str(script), str(home), node, description.shared, *_flags(directory, description, node)],
        enter=[*fabric.enter(description.name, node), *_NEW_NAMESPACES],
        log=home / "log",
        env={"PATH": search_path(engine)},
    )


def wait_until_up(directory: Path, node: str, *, seconds: float = 60) -> dict[str, Any]:
    """Return what the node's engine says of itself (`/info`) once it answers.

    Raises LabError with the end of its log if it dies, or does not answer within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        alive = machine(directory, node).pid is not None
        try:
            info: dict[str, Any] = api.request(engine_socket(directory, node), "GET", "/info", timeout=seconds)
            return info
        except OSError:
            if not alive or time.monotonic() > deadline:
                what = "does not answer" if alive else "has died"
                raise LabError(f"the engine {what}:\n{tail(directory / node / 'log')}", place=node) from None
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
        power_off(directory, description, node)
        fabric.connect(description, node)
        boot(directory, description, node)
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


def power_off(directory: Path, description: Description, node: str) -> None:
    """Take the node's power: its wire falls silent first, so that no peer is told; then all its processes are gone."""
    fabric.remove_wire(description.name, node)
    machine(directory, node).kill()
    fabric.remove(description.name, node)
    _remove_cgroup(_cgroup(description.name, node))


def remove_cgroups(lab: str) -> None:
    """Remove the control groups of a lab whose machines are off."""
    _remove_cgroup(f"/swarmtrain/{lab}")
    for hierarchy in _hierarchies():
        parent = hierarchy / "swarmtrain"
        if parent.is_dir() and not any(entry.is_dir() for entry in parent.iterdir()):
            parent.rmdir()


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
        # A branch of its own for each machine, so that what a killed one leaves can be told apart and removed.
        f"--cgroup-parent={_cgroup(description.name, node)}",
        "--exec-opt=native.cgroupdriver=cgroupfs",
        "--log-level=warn",
    ]


def _cgroup(lab: str, node: str) -> str:
    return f"/swarmtrain/{lab}/{node}"


def _remove_cgroup(group: str) -> None:
    for hierarchy in _hierarchies():
        for folder, _, _ in os.walk(hierarchy / group.lstrip("/"), topdown=False):
            _remove_empty(Path(folder))


def _remove_empty(group: Path) -> None:
    """Remove one control group; the kernel may take a moment to see the last dead process leave it."""
    deadline = time.monotonic() + 2
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _hierarchies() -> list[Path]:
    """Return the roots of cgroup v1's hierarchies, or the one of v2."""
    unified = (_CGROUPS / "cgroup.controllers").exists()
    return [_CGROUPS] if unified else [entry for entry in _CGROUPS.iterdir() if entry.is_dir() and not entry.is_symlink()]
