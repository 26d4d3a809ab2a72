"""Three machines whose owner has never used Swarm are set up as the page says; the other pages are followed on them; they are left again.

The tests run in this order, on one set of machines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import built
import page
import pytest
from reader import Fill, Reader, Shell

from swarmtrain.lab import REGISTRY, Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher

OWN_MACHINES = page.read("docs/how-to/own-machines.md")
LEAVE = next(number for number, step in enumerate(OWN_MACHINES) if step.heading == "Leave")
NODES = ["node0", "node1", "node2"]


@dataclass
class Machines:
    """The machines of a bare lab; `outside` and `inside` are the environments of a shell with a way out and of one without."""

    lab: Lab
    folder: Path
    transcripts: Path
    outside: dict[str, str]
    inside: dict[str, str]

    def follow(self, steps: list[page.Step]) -> None:
        """Do what a page says, with a new shell on each machine. Raises PageError."""
        shells = [self._shell(node) for node in NODES]
        # The connected machine of the page on machines without internet: here, with the Docker of one that has built before.
        connected = Shell(self.folder, self.transcripts / "connected.txt", {**self.outside, "DOCKER_HOST": self.lab.docker_host("node1")})
        try:
            Reader(shells, self._fill(), connected=connected).follow(steps)
        finally:
            for shell in [*shells, connected]:
                shell.close()

    def _shell(self, node: str) -> Shell:
        prefix = self.lab.enter(node, folder=self.folder)
        return Shell(self.folder, self.transcripts / f"{node}.txt", self.lab.environment_on(node, self.inside), prefix=prefix)

    def _fill(self) -> Fill:
        return {
            "REGISTRY": REGISTRY,
            "TOKEN": lambda printed: re.findall(r"--token (\S+)", printed)[-1],
            "ADDRESS": lambda printed: re.findall(r"--token \S+ (\S+):2377", printed)[-1],
            "ENGINE": self.lab.docker_host("node1"),
            "SPREAD": lambda printed: re.findall(r"\S+:spread-[0-9a-f]{12}", printed)[-1],
            "PINNED": lambda printed: re.findall(r"\S+@sha256:[0-9a-f]{64}", printed)[-1],
        }


@pytest.fixture(scope="module")
def machines(
    labs: Callable[[str], Lab],
    installed: dict[str, str],
    new_checkout: Callable[[], Path],
    shelf: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Machines]:
    """Three machines with Docker, as delivered; the image was built on them before, if it was built at all."""
    lab = labs(f"machines-{os.getpid()}")
    built.give_registry(shelf)
    lab.up(3, bare=True, say=print)
    built.give(lab, NODES, shelf)
    inside = {**installed, **package_index(tmp_path_factory.mktemp("index"))}
    yield Machines(lab, new_checkout(), tmp_path_factory.mktemp("shells"), installed, inside)
    lab.down(say=print)


@pytest.fixture(scope="module")
def swarm(machines: Machines) -> Machines:
    """The machines, set up as the page says."""
    machines.follow(OWN_MACHINES[:LEAVE])
    return machines


@pytest.fixture
def cleared(swarm: Machines) -> Iterator[None]:
    """What a page leaves that fails is taken away, so that the next one does not stumble over it."""
    yield
    launcher = SwarmLauncher(swarm.lab.docker_host("node0"))
    for run in launcher.runs():
        launcher.down(run, print)


def test_own_machines(swarm: Machines) -> None:
    states = {node["Description"]["Hostname"]: node["Status"]["State"] for node in Engine(swarm.lab.docker_host("node0")).get("/nodes")}
    assert states == dict.fromkeys(NODES, "ready")


@pytest.mark.parametrize(
    "name",
    [
        "docs/how-to/remote.md",
        "docs/how-to/doctor.md",
        "docs/how-to/own-script.md",
        "docs/how-to/network.md",
        "docs/how-to/own-data.md",
        "docs/how-to/images.md",
        "docs/how-to/plain-docker.md",
        "docs/how-to/watch.md",
        "docs/how-to/why.md",
        "docs/how-to/resume-and-scale.md",
        "docs/how-to/air-gapped.md",
    ],
)
def test_a_page_on_machines_that_are_set_up(swarm: Machines, cleared: None, name: str) -> None:
    swarm.follow(page.read(name))
    left = subprocess.run(
        ["docker", "-H", swarm.lab.docker_host("node0"), "service", "ls", "-q"], check=True, capture_output=True, text=True
    )
    assert left.stdout == ""


def test_leaving(swarm: Machines) -> None:
    swarm.follow(OWN_MACHINES[LEAVE:])
    assert [Engine(swarm.lab.docker_host(node)).get("/info")["Swarm"]["LocalNodeState"] for node in NODES] == ["inactive"] * 3


def package_index(folder: Path) -> dict[str, str]:
    """Return what gives pip on a machine of the lab, which has no way out, what `pip wheel` needs of a package index."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "hatchling"], check=True)
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
