"""Hosts behind real sshds: a lab of machines without engines, which is up in less than a second."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from swarmtrain import process
from swarmtrain.errors import LabError
from swarmtrain.lab import Lab, fabric

NAMES = ("gpu-0", "gpu-1", "gpu-2")
DISK = Path("/mnt/own")
"""A folder that is another one on each host."""


@contextlib.contextmanager
def machines(names: Sequence[str] = NAMES, *, part: str = "ssh") -> Iterator[Lab]:
    """Bring up a lab without engines for as long as a test takes; without what that needs the test is skipped, or fails in CI."""
    lab = Lab(f"{part}-{os.getpid()}")
    try:
        lab.check(parts=[part])
    except LabError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"this machine can host no lab: {error}")
    try:
        lab.up(names, parts=[part], say=print)
        yield lab
    finally:
        lab.down(say=print)


class Hosts:
    """The hosts, as long as a test runs. There is a stand-in for docker on each, and `stranger` does not let us in."""

    def __init__(self, lab: Lab, names: Sequence[str]) -> None:
        self.lab, self.names = lab, names
        self.bin = lab.directory / "bin"
        address = lab.status()[0].address
        with (lab.directory / "ssh" / "config").open("a") as config:
            config.write(f"Host stranger\n  HostName {address}\n  IdentityFile {lab.directory / 'ssh' / 'host'}\n")
        stand_in = Path(__file__).with_name("docker_stand_in.py")
        for name in names:
            docker = self.own(name) / "bin" / "docker"
            docker.parent.mkdir()
            docker.write_text(f'#!/bin/sh\nexec {sys.executable} {stand_in} "$@"\n')
            docker.chmod(0o755)

    def own(self, name: str) -> Path:
        """Return where this machine finds a host's DISK."""
        return self.lab.own_disk(name)

    def state(self, name: str) -> Path:
        """Return where this machine finds the state directory of a host."""
        return self.own(name) / "state"

    def pids(self, name: str) -> list[int]:
        """Return all that lives on a host."""
        return [int(pid) for pid in process.run(["ip", "netns", "pids", fabric.namespace(self.lab.name, name)]).split()]

    def programs(self, name: str) -> list[str]:
        """Return the command lines of what lives on a host, sshd and those whom it lets in left out."""
        found = []
        for pid in self.pids(name):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                found += [line] if line and not any(word in line for word in ("machine.sh", "sshd", "serve(")) else []
        return found

    def kill(self, name: str) -> None:
        """Take a host's power."""
        self.lab.kill(name, say=print)

    def cut(self, name: str) -> None:
        """Take a host's wire out."""
        self.lab.cut(name, say=print)

    def mend(self) -> None:
        """Start the hosts that were killed, and put all wires in again."""
        for node in self.lab.status():
            if node.state == "dead":
                self.lab.start(node.node, say=print)
            else:
                self.lab.heal(node.node, say=print)


@contextlib.contextmanager
def hosts_up(names: Sequence[str] = NAMES) -> Iterator[Hosts]:
    """Bring hosts up for as long as a test takes."""
    with machines(names) as lab:
        yield Hosts(lab, names)
