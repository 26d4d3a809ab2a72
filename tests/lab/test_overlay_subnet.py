"""The subnet of a run's overlay network on a real swarm: a run trains in it, and what overlaps with it is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_helpers import NODES, run_docker
from test_doctor import RunDoctor, changed_node, map_findings, run_doctor

from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine

__all__ = ["run_doctor"]  # a fixture

ROOT = Path(__file__).parents[2]
SUBNET = "10.99.4.0/24"


def run_swarmtrain(lab: Lab, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "DOCKER_HOST": lab.get_docker_host("node0")}
    argv = [sys.executable, "-m", "swarmtrain", *arguments]
    return subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def build_overrides(image: str, subnet: str) -> list[str]:
    return ["-o", f"runner.docker_config.docker_container={image}", "-o", f"runner.swarm.subnet={subnet}"]


@pytest.mark.test_all_only("one more training run on three nodes; tests/unit has the stack and the refusal")
def test_a_run_trains_in_its_subnet_and_another_run_cannot_have_it(lab: Lab, image: str) -> None:
    quickstart = ["deploy", "examples/quickstart.yml", "--yes", *build_overrides(image, SUBNET), "-o", "trainer.train_iterations=3"]
    try:
        done = run_swarmtrain(lab, *quickstart, "-o", "trainer.save_dir=null")
        assert done.returncode == 0, done.stdout + done.stderr
        network = json.loads(run_docker(lab, "network", "inspect", "quickstart_training"))[0]
        refused = run_swarmtrain(lab, *quickstart, "--name", "other", *build_overrides(image, "10.99.0.0/16"))
        networks = run_docker(lab, "network", "ls", "--format", "{{.Name}}").split()
    finally:
        assert run_swarmtrain(lab, "down", "quickstart").returncode == 0
    assert [pool["Subnet"] for pool in network["IPAM"]["Config"]] == [SUBNET]
    assert refused.returncode == 1
    assert f"network other_training: its subnet 10.99.0.0/16 overlaps with {SUBNET}, the subnet of the network quickstart_training" in (
        refused.stderr
    )
    assert "hint: set runner.swarm.subnet: 10." in refused.stderr
    assert "other_training" not in networks


@pytest.mark.test_all_only("starts a probe; tests/doctor has each finding")
def test_doctor_names_a_resolver_and_machines_inside_the_subnet(run_doctor: RunDoctor, lab: Lab, engine: DockerEngine) -> None:
    """The overlay has the subnet of the machines' own network, in which node1 also has its resolver."""
    addresses = {node.node: node.address for node in lab.get_status()}
    subnet = f"{addresses['node0'].rpartition('.')[0]}.0/24"
    resolver = f"{addresses['node0'].rpartition('.')[0]}.253"
    write_file = f"echo nameserver {resolver} >/run/resolv.conf; mount --bind /run/resolv.conf /etc/resolv.conf"
    with changed_node(lab, "node1", write_file, "umount /etc/resolv.conf"):
        answers = run_doctor(f"runner.swarm.subnet={subnet}", expect_healthy=True)
    [finding] = map_findings(answers)["subnet"]
    assert finding.startswith(f"network {subnet}: contains ")
    assert all(f"{addresses[node]}, the address of {node}" in finding for node in NODES)
    # Engines before 25 do not show the resolver in the container.
    version = tuple(int(part) for part in engine.get("/version")["Version"].split("+")[0].split(".")[:2])
    assert (f"{resolver}, a DNS resolver of node1 on node1" in finding) is (version >= (25, 0))
    [hint] = [one["hint"] for each in answers["checks"] if each["check"] == "subnet" for one in each["findings"]]
    suggested = hint.removeprefix("set runner.swarm.subnet: ").partition(";")[0]
    assert "subnet" not in map_findings(run_doctor(f"runner.swarm.subnet={suggested}", expect_healthy=True))
