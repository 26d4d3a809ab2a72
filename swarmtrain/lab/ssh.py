"""SSH servers of the lab's machines: each accepts logins of root with the lab's key; the client configuration contains the host keys."""

from __future__ import annotations

import shlex
from pathlib import Path

from swarmtrain import process
from swarmtrain.lab import cpu_share, machines
from swarmtrain.lab.state import LabDescription

PORT = 22
_NODE_DISK = "/mnt/own"
_SESSION_PATH = f"{_NODE_DISK}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# On a machine of the lab, ssh uses the lab's key for every user, as it does in a shell with the variables of `lab env`.
_SSHD_SERVICE = """mkdir -m 755 /run/sshd
mount --bind {config} /etc/ssh/ssh_config
exec "$(command -v sshd)" -D -e -f {settings}
"""


def get_client_config_path(lab_folder: Path) -> Path:
    """Return the path of the SSH client configuration, which defines the host names of the lab's machines."""
    return lab_folder / "ssh" / "config"


def get_sshd_config_path(lab_folder: Path, node: str) -> Path:
    """Return the path of a node's sshd_config."""
    return lab_folder / node / "sshd_config"


def write_ssh_files(lab_folder: Path, description: LabDescription) -> None:
    """Create the lab's SSH keys, its known_hosts file, and the SSH client configuration."""
    folder = get_client_config_path(lab_folder).parent
    folder.mkdir()
    for name in ("host", "user"):
        process.run_command(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {description.name}", "-f", str(folder / name)])
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    addresses = {node: description.get_node_address(node) for node in description.nodes}
    (folder / "known_hosts").write_text("".join(f"{address} {key}\n" for address in addresses.values()))
    hosts = [f"Host {node} {address}\n  HostName {address}\n  IdentityFile {folder / 'user'}\n" for node, address in addresses.items()]
    common_lines = ["User root", "IdentitiesOnly yes", f"UserKnownHostsFile {folder / 'known_hosts'}", "StrictHostKeyChecking yes"]
    get_client_config_path(lab_folder).write_text("".join([*hosts, "Host *\n", *(f"  {line}\n" for line in common_lines)]))


def build_sshd_service(lab_folder: Path, description: LabDescription, node: str) -> str:
    """Write the settings of a node's sshd, and return the shell script that runs the sshd.

    A session uses the node's own programs, settings and state: `bin`, `config` and `state` on its disk.
    """
    lines = [
        f"ListenAddress {description.get_node_address(node)}",
        f"HostKey {lab_folder / 'ssh' / 'host'}",
        f"AuthorizedKeysFile {lab_folder / 'ssh' / 'user.pub'}",
        "AllowUsers root",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "PidFile none",
        f"SetEnv PATH={_SESSION_PATH} XDG_CONFIG_HOME={_NODE_DISK}/config XDG_STATE_HOME={_NODE_DISK}/state "
        f"{cpu_share.format_cores_assignment(description)}",
    ]
    get_sshd_config_path(lab_folder, node).write_text("".join(f"{line}\n" for line in lines))
    return _SSHD_SERVICE.format(
        config=shlex.quote(str(get_client_config_path(lab_folder))), settings=shlex.quote(str(get_sshd_config_path(lab_folder, node)))
    )


def wait_until_sshd_up(lab_folder: Path, node: str) -> None:
    """Wait until the node's sshd listens. Raises LabError with the sshd's log if it does not."""
    machines.wait_until_service_listens(lab_folder, node, "sshd", PORT)
