"""Three hosts behind real sshds, each in a network namespace of its own on one bridge; the launcher's ssh has one too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from swarmtrain import process
from swarmtrain.lab import fabric
from swarmtrain.lab.state import Description, choose_subnet, taken_subnets

NAMES = ("gpu-0", "gpu-1", "gpu-2")
_LAUNCHER = "launcher"
_SSHD = "/usr/sbin/sshd"
# A disk of its own, and the folder that sshd wants: tests beside these would take one that all share away.
_MOUNTED = 'mount --bind "$0" "$1" && shift && mount -t tmpfs run /run && mkdir -m 755 /run/sshd && exec "$@"'


class Hosts:
    """The hosts, as long as a test runs."""

    def __init__(self, folder: Path, names: tuple[str, ...] = NAMES) -> None:
        lab = f"ssh-{os.getpid()}"
        self.folder, self.names = folder, names
        self.lab = Description(lab, choose_subnet(lab, taken_subnets(folder)), (*names, _LAUNCHER), str(folder))
        self.bin = folder / "bin"
        self.disk = folder / "disk"
        """A folder that is another one on each host: its `own` one."""
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def up(self) -> None:
        """Make the network, the keys and the daemons."""
        fabric.check_kernel()
        self.bin.mkdir()
        self.disk.mkdir()
        stand_in = Path(__file__).with_name("docker_stand_in.py")
        (self.bin / "docker").write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
        (self.bin / "docker").chmod(0o755)
        for name in ("host", "user"):
            process.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)])
        fabric.make(self.lab)
        known = (self.folder / "host.pub").read_text().split()[:2]
        settings = [
            "User root",
            "IdentitiesOnly yes",
            f"UserKnownHostsFile {self.folder / 'known_hosts'}",
            "StrictHostKeyChecking yes",
        ]
        lines = [f"Host {name}\n  HostName {self.lab.address(name)}\n  IdentityFile {self.folder / 'user'}" for name in self.names]
        lines += [f"Host stranger\n  HostName {self.lab.address(self.names[0])}\n  IdentityFile {self.folder / 'host'}"]
        (self.folder / "ssh_config").write_text("\n".join([*lines, "Host *", *(f"  {line}" for line in settings), ""]))
        (self.folder / "known_hosts").write_text("".join(f"{self.lab.address(name)} {' '.join(known)}\n" for name in self.names))
        for name in self.lab.nodes:
            fabric.connect(self.lab, name)
        for name in self.names:
            self.start(name)
        within = " ".join(fabric.enter(self.lab.name, _LAUNCHER))
        (self.bin / "ssh").write_text(f'#!/bin/sh\nexec {within} /usr/bin/ssh -F {self.folder / "ssh_config"} "$@"\n')
        (self.bin / "ssh").chmod(0o755)

    def start(self, name: str) -> None:
        """Start a host's sshd, as after a boot, and wait until it listens."""
        own = self.folder / name
        self.own(name).mkdir(parents=True, exist_ok=True)
        (own / "sshd_config").write_text(
            "\n".join(
                [
                    f"ListenAddress {self.lab.address(name)}",
                    f"HostKey {self.folder / 'host'}",
                    f"AuthorizedKeysFile {self.folder / 'user.pub'}",
                    "PidFile none",
                    "StrictModes no",
                    "UsePAM no",
                    "PasswordAuthentication no",
                    "PermitRootLogin prohibit-password",
                    f"SetEnv XDG_STATE_HOME={own} PIP_CONFIG_FILE={own}/pip.conf PATH={self.bin}:/usr/sbin:/usr/bin:/sbin:/bin",
                    "",
                ]
            )
        )
        within = ["unshare", "--mount", "sh", "-c", _MOUNTED, str(self.own(name)), str(self.disk)]
        argv = [*fabric.enter(self.lab.name, name), *within, _SSHD, "-D", "-e", "-f", str(own / "sshd_config")]
        with (own / "sshd.log").open("ab") as log:
            self._daemons[name] = process.start(argv, stdout=log, stderr=log, new_session=True)
        probe = f"import socket; socket.create_connection(('{self.lab.address(name)}', 22), 5)"
        end = time.monotonic() + 20
        while True:
            try:
                process.run([*fabric.enter(self.lab.name, name), "python3", "-c", probe])
                return
            except process.ProcessError:
                assert time.monotonic() < end, (own / "sshd.log").read_text()
                time.sleep(0.05)

    def own(self, name: str) -> Path:
        """Return where this machine finds the disk of a host."""
        return self.folder / name / "disk"

    def pids(self, name: str) -> list[int]:
        """Return all that lives on a host."""
        return [int(pid) for pid in process.run(["ip", "netns", "pids", fabric.namespace(self.lab.name, name)]).split()]

    def programs(self, name: str) -> list[str]:
        """Return the command lines of what lives on a host, sshd and those whom it lets in left out."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                found += [line] if line and "sshd" not in line and "serve(" not in line else []
        return found

    def kill(self, name: str) -> None:
        """Kill everything on a host, sshd too."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._daemons.pop(name).wait()

    def cut(self, name: str) -> None:
        """Take a host's wire out."""
        fabric.cut(self.lab.name, name)

    def mend(self) -> None:
        """Put all wires in again, and start the hosts that were killed."""
        for name in self.names:
            fabric.heal(self.lab.name, name)
            if name not in self._daemons:
                self.start(name)

    def down(self) -> None:
        """End and remove everything."""
        for name in self._daemons:
            for pid in self.pids(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons.values():
            daemon.wait()
        for part in (*self.lab.nodes, "fabric"):
            fabric.remove(self.lab.name, part)
