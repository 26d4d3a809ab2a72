"""The sshds of the lab's machines: each lets root in with the lab's own key, and all who use that key know the hosts."""

from __future__ import annotations

import shlex
from pathlib import Path

from swarmtrain import process
from swarmtrain.lab import cores, machines
from swarmtrain.lab.state import Description

PORT = 22
_OWN = "/mnt/own"
_PATH = f"{_OWN}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Anybody's ssh on the machine uses the lab's key, as it does in a shell that `lab env` was for.
_SERVICE = """mkdir -m 755 /run/sshd
mount --bind {config} /etc/ssh/ssh_config
exec "$(command -v sshd)" -D -e -f {settings}
"""


def config(directory: Path) -> Path:
    """Return the client's configuration, in which the lab's machines have their names."""
    return directory / "ssh" / "config"


def settings(directory: Path, node: str) -> Path:
    """Return the sshd_config of a node."""
    return directory / node / "sshd_config"


def make(directory: Path, description: Description) -> None:
    """Make the lab's keys, and the client's configuration."""
    folder = config(directory).parent
    folder.mkdir()
    for name in ("host", "user"):
        process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", f"lab {description.name}", "-f", str(folder / name)])
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    addresses = {node: description.address(node) for node in description.nodes}
    (folder / "known_hosts").write_text("".join(f"{address} {key}\n" for address in addresses.values()))
    hosts = [f"Host {node}\n  HostName {address}\n  IdentityFile {folder / 'user'}\n" for node, address in addresses.items()]
    common = ["User root", "IdentitiesOnly yes", f"UserKnownHostsFile {folder / 'known_hosts'}", "StrictHostKeyChecking yes"]
    config(directory).write_text("".join([*hosts, "Host *\n", *(f"  {line}\n" for line in common)]))


def service(directory: Path, description: Description, node: str) -> str:
    """Write the settings of a node's sshd, and return the script that runs it.

    Who comes in has the node's own programs, settings and state: `bin`, `config` and `state` on its disk.
    """
    lines = [
        f"ListenAddress {description.address(node)}",
        f"HostKey {directory / 'ssh' / 'host'}",
        f"AuthorizedKeysFile {directory / 'ssh' / 'user.pub'}",
        "AllowUsers root",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "UsePAM no",
        "StrictModes no",
        "PidFile none",
        f"SetEnv PATH={_PATH} XDG_CONFIG_HOME={_OWN}/config XDG_STATE_HOME={_OWN}/state {cores.setting(description)}",
    ]
    settings(directory, node).write_text("".join(f"{line}\n" for line in lines))
    return _SERVICE.format(config=shlex.quote(str(config(directory))), settings=shlex.quote(str(settings(directory, node))))


def wait_until_up(directory: Path, node: str) -> None:
    """Return once the node's sshd listens. Raises LabError with what it said if it does not."""
    machines.wait_until_listening(directory, node, "sshd", PORT)
