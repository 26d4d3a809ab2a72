"""Requirements of a config that the nodes do not meet."""

from __future__ import annotations

import subprocess
import time

import pytest
from error_cases import ErrorCase
from swarm_helpers import print_line, run_docker

from swarmtrain.lab import Lab

CHAPTER = "The nodes"
pytestmark = pytest.mark.usefixtures("connect_to_lab")

IMAGE = "docker_config: {docker_container: 'registry.lab:5000/swarmtrain:0.1'}"


def test_a_host_that_the_swarm_lacks(error_case: ErrorCase) -> None:
    """Host is not in the swarm

    `hosts` names a machine that has not joined the swarm, or that has another name there.
    """
    error_case.write_config(f"runner: {{hosts: [node0, gpu-7], {IMAGE}}}")
    error_case("swarmtrain deploy config.yml")


def test_a_host_that_takes_nothing(error_case: ErrorCase, lab: Lab) -> None:
    """Node is drained or down

    Without `hosts`, swarmtrain does not use such nodes. If `hosts` names one, the deploy fails.
    """
    error_case.write_config(f"runner: {{hosts: [node0, node2], {IMAGE}}}")
    error_case.run_setup("docker node update --availability drain node2")
    error_case("swarmtrain deploy config.yml")
    error_case("swarmtrain deploy config.yml -o runner.hosts=null -o runner.nodes=3")
    run_docker(lab, "node", "update", "--availability", "active", "node2")
    lab.power_off_node("node2", report_progress=print_line)
    try:
        end = time.monotonic() + 60
        while run_docker(lab, "node", "ls", "--filter", "name=node2", "--format", "{{.Status}}").strip() != "Down":
            assert time.monotonic() < end
            time.sleep(0.5)
        error_case.add_paragraph("The same node, powered off:")
        error_case("swarmtrain deploy config.yml")
    finally:
        lab.power_on_node("node2", report_progress=print_line)


def test_labels(error_case: ErrorCase) -> None:
    """No node has the labels

    `runner.swarm.labels` selects the nodes.
    """
    error_case.write_config(f"runner: {{nodes: 2, swarm: {{labels: {{gpu: h100}}}}, {IMAGE}}}")
    error_case("swarmtrain deploy config.yml")


def test_more_nodes_than_there_are(error_case: ErrorCase) -> None:
    """Not enough nodes

    The config or `swarmtrain scale` requests more nodes than the swarm has. An existing run continues unchanged.
    """
    error_case.write_config(f"runner: {{nodes: 4, {IMAGE}}}")
    error_case("swarmtrain deploy config.yml")
    error_case("swarmtrain deploy config.yml -o runner.nodes=1 --detach", code=0, show=False, allowed_changes="home/state")
    error_case("swarmtrain scale config --nodes 4")


def test_a_mount_that_one_node_lacks(error_case: ErrorCase, lab: Lab) -> None:
    """Mount is missing on one node

    The folder exists on the first node, but not on the second. Only the node itself can detect this. The deploy is rolled back.
    """
    subprocess.run([*lab.build_enter_command("node0"), "mkdir", "-p", "/mnt/datasets"], check=True)
    error_case.write_config(
        """
        runner:
          nodes: 2
          docker_config:
            docker_container: registry.lab:5000/swarmtrain:0.1
            docker_mounts: [[/mnt/datasets, /data]]
        """
    )
    error_case("swarmtrain deploy config.yml", start_pattern="^error:", allowed_changes="home/state")
    error_case("swarmtrain status config")
