"""The lab's machines: each is an init process in namespaces of its own, and the services that this starts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from swarmtrain.errors import LabError
from swarmtrain.lab import fabric
from swarmtrain.lab.checks import search_path
from swarmtrain.lab.state import Daemon, Description, tail

_NEW_NAMESPACES = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
_CGROUPS = Path("/sys/fs/cgroup")


def machine(directory: Path, node: str) -> Daemon:
    """Return the node's init process; all that runs in the machine lives and dies with it."""
    return Daemon(directory / node / "pid")


def own_disk(directory: Path, node: str) -> Path:
    """Return where this machine finds what the node has at /mnt/own."""
    return directory / node / "own"


def prepare(directory: Path, description: Description, node: str) -> None:
    """Make the disk of a node that has never run, and write the names it knows."""
    home = directory / node
    (home / "services").mkdir(parents=True)
    own_disk(directory, node).mkdir()
    known = {description.address(name): name for name in description.nodes} | {description.bridge_address: fabric.REGISTRY_HOST}
    (home / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in known.items()))


def add(directory: Path, node: str, services: Mapping[str, str]) -> None:
    """Write the shell scripts of the services that the node starts at each boot, the one of its engine called `engine`."""
    for service, script in services.items():
        (directory / node / "services" / service).write_text(script)


def boot(directory: Path, description: Description, node: str) -> None:
    """Connect the node and power it on; returns as soon as its init runs. Raises LabError if it does not."""
    home = directory / node
    # Nothing else of the user's shell: a proxy that is set there would swallow the way to the lab's registry.
    path = search_path(Path(description.engine) if description.engine else None)
    fabric.connect(description, node)
    machine(directory, node).spawn(
        ["sh", str(Path(__file__).with_name("machine.sh")), str(home), node, description.shared],
        enter=[*fabric.enter(description.name, node), "env", "-i", f"PATH={path}", "HOME=/root", *_NEW_NAMESPACES],
        log=home / "init.log",
    )


def power_off(directory: Path, description: Description, node: str) -> None:
    """Take the node's power: its wire falls silent first, so that no peer is told; then all its processes are gone."""
    fabric.remove_wire(description.name, node)
    machine(directory, node).kill()
    fabric.remove(description.name, node)
    _remove_cgroup(cgroup(description.name, node))


def said(directory: Path, node: str, service: str) -> str:
    """Return the last that the node's init and one of its services have said."""
    logs = (directory / node / f"{name}.log" for name in ("init", service))
    return "\n".join(tail(log) for log in logs if log.exists()).strip()


def wait_until_listening(directory: Path, node: str, service: str, port: int, *, seconds: float = 60) -> None:
    """Return once a service of the node has its TCP port. Raises LabError with what it said if the machine dies, or after `seconds`."""
    deadline = time.monotonic() + seconds
    while port not in listening(pid := machine(directory, node).pid):
        if pid is None or time.monotonic() > deadline:
            raise LabError(f"{service} does not start:\n{said(directory, node, service)}", place=node)
        time.sleep(0.02)


def listening(pid: int | None) -> set[int]:
    """Return the TCP ports at which anything listens in the network namespace of process `pid`; none if it is gone."""
    try:
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def cgroup(lab: str, node: str) -> str:
    """Return the control group of a node: a branch of its own, so that what a killed one leaves can be told apart and removed."""
    return f"/swarmtrain/{lab}/{node}"


def remove_cgroups(lab: str) -> None:
    """Remove the control groups of a lab whose machines are off."""
    _remove_cgroup(f"/swarmtrain/{lab}")
    for hierarchy in _hierarchies():
        parent = hierarchy / "swarmtrain"
        if parent.is_dir() and not any(entry.is_dir() for entry in parent.iterdir()):
            parent.rmdir()


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
