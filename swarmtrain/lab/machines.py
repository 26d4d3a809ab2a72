"""The lab's machines: each is an init process in its own namespaces, and the services that this process starts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

from swarmtrain.errors import LabError
from swarmtrain.lab import network
from swarmtrain.lab.prerequisites import build_search_path
from swarmtrain.lab.state import LabDaemon, LabDescription, read_last_log_lines

_UNSHARE_COMMAND = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"]
_CGROUPS = Path("/sys/fs/cgroup")


def get_init_daemon(lab_folder: Path, node: str) -> LabDaemon:
    """Return the init process of the node. When it exits, all processes of the machine are killed."""
    return LabDaemon(lab_folder / node / "pid")


def get_node_disk(lab_folder: Path, node: str) -> Path:
    """Return the host path of the disk that the node mounts at /mnt/own."""
    return lab_folder / node / "own"


def create_node_files(lab_folder: Path, description: LabDescription, node: str) -> None:
    """Create the files of a new node: its disk, its hosts file, and the folder of its service scripts."""
    node_folder = lab_folder / node
    (node_folder / "services").mkdir(parents=True)
    get_node_disk(lab_folder, node).mkdir()
    names_by_address = {description.get_node_address(name): name for name in description.nodes} | {
        description.bridge_address: network.REGISTRY_HOST
    }
    (node_folder / "hosts").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in names_by_address.items())
    )


def write_service_scripts(lab_folder: Path, node: str, services: Mapping[str, str]) -> None:
    """Write the shell scripts of the services that the node starts at each boot; the engine's script is named `engine`."""
    for service, script in services.items():
        (lab_folder / node / "services" / service).write_text(script)


def boot_node(lab_folder: Path, description: LabDescription, node: str) -> None:
    """Connect the node to the network and power it on. Returns as soon as its init runs. Raises LabError if it does not start."""
    node_folder = lab_folder / node
    # Pass no other variables of the user's shell: a proxy setting would intercept requests to the lab's registry.
    path = build_search_path(Path(description.engine) if description.engine else None)
    network.connect_node(description, node)
    get_init_daemon(lab_folder, node).spawn(
        ["sh", str(Path(__file__).with_name("machine.sh")), str(node_folder), node, description.shared],
        enter_command=[*network.build_enter_command(description.name, node), "env", "-i", f"PATH={path}", "HOME=/root", *_UNSHARE_COMMAND],
        log=node_folder / "init.log",
    )


def power_off_node(lab_folder: Path, description: LabDescription, node: str) -> None:
    """Power off the node: its network link is removed first, so that no peer is notified; then all its processes are killed."""
    network.remove_node_link(description.name, node)
    get_init_daemon(lab_folder, node).kill()
    network.remove_namespace(description.name, node)
    _remove_cgroup(get_cgroup_name(description.name, node))


def read_log_tail(lab_folder: Path, node: str, service: str) -> str:
    """Return the last log lines of the node's init and of one of its services."""
    logs = (lab_folder / node / f"{name}.log" for name in ("init", service))
    return "\n".join(read_last_log_lines(log) for log in logs if log.exists()).strip()


def wait_until_service_listens(lab_folder: Path, node: str, service: str, port: int, *, timeout: float = 60) -> None:
    """Wait until `service` of the node listens on TCP port `port`.

    Raises LabError with the service's log if the machine dies, or if the service does not listen within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while port not in list_listening_ports(pid := get_init_daemon(lab_folder, node).pid):
        if pid is None or time.monotonic() > deadline:
            raise LabError(f"{service} does not start:\n{read_log_tail(lab_folder, node, service)}", place=node)
        time.sleep(0.02)


def list_listening_ports(pid: int | None) -> set[int]:
    """Return the TCP ports on which processes listen in the network namespace of process `pid`; empty if `pid` does not exist."""
    try:
        rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    except OSError:
        return set()
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def get_cgroup_name(lab: str, node: str) -> str:
    """Return the cgroup name of a node. Each node has its own subtree, so that leftovers of a killed node can be found and removed."""
    return f"/swarmtrain/{lab}/{node}"


def remove_cgroups(lab: str) -> None:
    """Remove the cgroups of a lab whose machines are powered off."""
    _remove_cgroup(f"/swarmtrain/{lab}")
    for hierarchy in _list_cgroup_roots():
        parent = hierarchy / "swarmtrain"
        if parent.is_dir() and not any(entry.is_dir() for entry in parent.iterdir()):
            parent.rmdir()


def _remove_cgroup(cgroup_name: str) -> None:
    for hierarchy in _list_cgroup_roots():
        for folder, _, _ in os.walk(hierarchy / cgroup_name.lstrip("/"), topdown=False):
            _remove_empty_cgroup(Path(folder))


def _remove_empty_cgroup(cgroup_path: Path) -> None:
    """Remove one empty cgroup; retry for up to 2 s, because the kernel may still count a process that has just exited."""
    deadline = time.monotonic() + 2
    while True:
        try:
            cgroup_path.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return


def _list_cgroup_roots() -> list[Path]:
    """Return the roots of the hierarchies of cgroup v1, or the single root of v2."""
    unified = (_CGROUPS / "cgroup.controllers").exists()
    return [_CGROUPS] if unified else [entry for entry in _CGROUPS.iterdir() if entry.is_dir() and not entry.is_symlink()]
