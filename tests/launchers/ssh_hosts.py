"""Hosts behind real sshds: a lab of machines without engines, which starts in less than 1 s."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from swarmtrain import process
from swarmtrain.errors import LabError
from swarmtrain.lab import Lab, network

HOST_NAMES = ("gpu-0", "gpu-1", "gpu-2")
NODE_LOCAL_FOLDER = Path("/mnt/own")
"""A folder that is local to each host."""


@contextlib.contextmanager
def start_lab(names: Sequence[str] = HOST_NAMES, *, part: str = "ssh") -> Iterator[Lab]:
    """Run a lab without engines as a context manager. If prerequisites are missing, the test is skipped; with CI=true it fails."""
    lab = Lab(f"{part}-{os.getpid()}")
    try:
        lab.check_prerequisites(components=[part])
    except LabError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"this machine can host no lab: {error}")
    try:
        lab.bring_up(names, components=[part], report_progress=print)
        yield lab
    finally:
        lab.tear_down(report_progress=print)


class Hosts:
    """The hosts of a test. Each has a stub of docker. The SSH config also has `stranger`, a host that refuses our key."""

    def __init__(self, lab: Lab, names: Sequence[str]) -> None:
        self.lab, self.names = lab, names
        self.bin = lab.directory / "bin"
        address = lab.get_status()[0].address
        with (lab.directory / "ssh" / "config").open("a") as config:
            config.write(f"Host stranger\n  HostName {address}\n  IdentityFile {lab.directory / 'ssh' / 'host'}\n")
        stub = Path(__file__).with_name("stub_docker.py")
        for name in names:
            docker = self.get_local_disk(name) / "bin" / "docker"
            docker.parent.mkdir()
            docker.write_text(f'#!/bin/sh\nexec {sys.executable} {stub} "$@"\n')
            docker.chmod(0o755)

    def get_local_disk(self, name: str) -> Path:
        """Return the path on this machine of a host's local disk."""
        return self.lab.get_node_disk(name)

    def get_state_dir(self, name: str) -> Path:
        """Return the path on this machine of a host's state directory."""
        return self.get_local_disk(name) / "state"

    def list_pids(self, name: str) -> list[int]:
        """Return the pids of all processes on a host."""
        return [int(pid) for pid in process.run_command(["ip", "netns", "pids", network.get_namespace_name(self.lab.name, name)]).split()]

    def list_programs(self, name: str) -> list[str]:
        """Return the command lines of the processes on a host, without sshd and its sessions."""
        found = []
        for pid in self.list_pids(name):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
                found += [line] if line and not any(word in line for word in ("machine.sh", "sshd", "serve_requests(")) else []
        return found

    def power_off_host(self, name: str) -> None:
        """Power off a host."""
        self.lab.power_off_node(name, report_progress=print)

    def partition_host(self, name: str) -> None:
        """Partition a host: cut it off from the network."""
        self.lab.partition_node(name, report_progress=print)

    def restore_hosts(self) -> None:
        """Power on the hosts that are dead, and reconnect the network of the others."""
        for node in self.lab.get_status():
            if node.state == "dead":
                self.lab.power_on_node(node.node, report_progress=print)
            else:
                self.lab.reconnect_node(node.node, report_progress=print)


@contextlib.contextmanager
def start_hosts(names: Sequence[str] = HOST_NAMES) -> Iterator[Hosts]:
    """Run hosts as a context manager."""
    with start_lab(names) as lab:
        yield Hosts(lab, names)
