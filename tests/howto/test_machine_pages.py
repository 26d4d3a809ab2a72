"""The page on own machines sets up a swarm on three machines; other pages are followed on it; at the end the machines leave it.

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

import image_cache
import page
import pytest
from page_runner import PageRunner, Shell, Substitutions

from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher

OWN_MACHINES = page.read_page("docs/how-to/own-machines.md")
LEAVE_STEP = next(number for number, step in enumerate(OWN_MACHINES) if step.heading == "Leave")
NODES = ["node0", "node1", "node2"]


@dataclass
class Machines:
    """The machines of a bare lab. `online_env` and `offline_env` are the environments of shells with and without internet access."""

    lab: Lab
    folder: Path
    transcripts: Path
    online_env: dict[str, str]
    offline_env: dict[str, str]

    def follow_page(self, steps: list[page.PageStep]) -> None:
        """Follow a page's steps, with a new shell on each machine. Raises PageError."""
        shells = [self._open_shell(node) for node in NODES]
        # The connected machine of the page on machines without internet: this machine, with the engine of node1.
        connected = Shell(
            self.folder, self.transcripts / "connected.txt", {**self.online_env, "DOCKER_HOST": self.lab.get_docker_host("node1")}
        )
        try:
            PageRunner(shells, self._build_substitutions(), connected_machine=connected).run_steps(steps)
        finally:
            for shell in [*shells, connected]:
                shell.close()

    def _open_shell(self, node: str) -> Shell:
        prefix = self.lab.build_enter_command(node, start_folder=self.folder)
        return Shell(self.folder, self.transcripts / f"{node}.txt", self.lab.build_node_environment(node, self.offline_env), prefix=prefix)

    def _build_substitutions(self) -> Substitutions:
        return {
            # These machines cannot reach Docker Hub, and the pages say what to do then.
            "swarmtrain image build .": 'swarmtrain image build . --base "$(swarmtrain lab base-image)"',
            "REGISTRY": REGISTRY_ADDRESS,
            "TOKEN": lambda printed: re.findall(r"--token (\S+)", printed)[-1],
            "ADDRESS": lambda printed: re.findall(r"--token \S+ (\S+):2377", printed)[-1],
            "ENGINE": self.lab.get_docker_host("node1"),
            "SPREAD": lambda printed: re.findall(r"\S+:spread-[0-9a-f]{12}", printed)[-1],
            "PINNED": lambda printed: re.findall(r"\S+@sha256:[0-9a-f]{64}", printed)[-1],
        }


@pytest.fixture(scope="module")
def machines(
    create_lab: Callable[[str], Lab],
    installed_environment: dict[str, str],
    copy_checkout: Callable[[], Path],
    image_cache_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Machines]:
    """Three machines with freshly installed Docker. They have the image, if an earlier test built it."""
    lab = create_lab(f"machines-{os.getpid()}")
    image_cache.restore_registry(image_cache_folder)
    lab.bring_up(3, bare=True, report_progress=print)
    image_cache.restore_images(lab, NODES, image_cache_folder)
    offline_env = {**installed_environment, **download_package_index(tmp_path_factory.mktemp("index"))}
    yield Machines(lab, copy_checkout(), tmp_path_factory.mktemp("shells"), installed_environment, offline_env)
    lab.tear_down(report_progress=print)


@pytest.fixture(scope="module")
def swarm(machines: Machines) -> Machines:
    """The machines, with the swarm set up as the page says."""
    machines.follow_page(OWN_MACHINES[:LEAVE_STEP])
    return machines


@pytest.fixture
def clean_swarm(swarm: Machines) -> Iterator[None]:
    """Remove the runs that a failed page leaves, so that they do not disturb the next page."""
    yield
    launcher = SwarmLauncher(swarm.lab.get_docker_host("node0"))
    for run in launcher.list_runs():
        launcher.tear_down_run(run, print)


def test_own_machines(swarm: Machines) -> None:
    states = {
        node["Description"]["Hostname"]: node["Status"]["State"] for node in DockerEngine(swarm.lab.get_docker_host("node0")).get("/nodes")
    }
    assert states == dict.fromkeys(NODES, "ready")


@pytest.mark.parametrize(
    "name",
    [
        "docs/how-to/remote.md",
        "docs/how-to/doctor.md",
        "docs/how-to/custom-script.md",
        "docs/how-to/network.md",
        "docs/how-to/own-data.md",
        "docs/how-to/images.md",
        "docs/how-to/plain-docker.md",
        "docs/how-to/watch.md",
        "docs/how-to/why.md",
        "docs/how-to/resume-and-scale.md",
        "docs/how-to/unequal-machines.md",
        "docs/how-to/air-gapped.md",
    ],
)
def test_a_page_on_machines_that_are_set_up(swarm: Machines, clean_swarm: None, name: str) -> None:
    swarm.follow_page(page.read_page(name))
    left = subprocess.run(
        ["docker", "-H", swarm.lab.get_docker_host("node0"), "service", "ls", "-q"], check=True, capture_output=True, text=True
    )
    assert left.stdout == ""


def test_slow_network(swarm: Machines, clean_swarm: None) -> None:
    """With links of 100 Mbit/s, so that what the page shows is what a reader of this page sees."""
    for node in NODES:
        swarm.lab.limit_node_bandwidth(node, "100mbit", report_progress=print)
    try:
        swarm.follow_page(page.read_page("docs/how-to/slow-network.md"))
    finally:
        for node in NODES:
            swarm.lab.reconnect_node(node, report_progress=print)


def test_leaving_the_swarm(swarm: Machines) -> None:
    swarm.follow_page(OWN_MACHINES[LEAVE_STEP:])
    assert [DockerEngine(swarm.lab.get_docker_host(node)).get("/info")["Swarm"]["LocalNodeState"] for node in NODES] == ["inactive"] * 3


def download_package_index(folder: Path) -> dict[str, str]:
    """Return pip's settings for a lab machine without internet, with what `pip wheel` needs from a package index in `folder`."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), "hatchling"], check=True)
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
