"""What a config wants of the nodes, and they do not have."""

from __future__ import annotations

import subprocess
import time

import pytest
from answers import Answer
from stand_in import docker, say

from swarmtrain.lab import Lab

CHAPTER = "The nodes"
pytestmark = pytest.mark.usefixtures("on_the_lab")

IMAGE = "docker_config: {docker_container: 'registry.lab:5000/swarmtrain:0.1'}"


def test_a_host_that_the_swarm_lacks(answer: Answer) -> None:
    """A host that the swarm lacks

    `hosts` names a machine that has not joined, or is spelt otherwise there.
    """
    answer.config(f"runner: {{hosts: [node0, gpu-7], {IMAGE}}}")
    answer("swarmtrain deploy config.yml")


def test_a_host_that_takes_nothing(answer: Answer, lab: Lab) -> None:
    """A host that is drained, or down

    Without `hosts`, such machines are left out. Where `hosts` names one, it is missed.
    """
    answer.config(f"runner: {{hosts: [node0, node2], {IMAGE}}}")
    answer.situation("docker node update --availability drain node2")
    answer("swarmtrain deploy config.yml")
    answer("swarmtrain deploy config.yml -o runner.hosts=null -o runner.nodes=3")
    docker(lab, "node", "update", "--availability", "active", "node2")
    lab.kill("node2", say=say)
    try:
        end = time.monotonic() + 60
        while docker(lab, "node", "ls", "--filter", "name=node2", "--format", "{{.Status}}").strip() != "Down":
            assert time.monotonic() < end
            time.sleep(0.5)
        answer.say("And when that machine has lost its power:")
        answer("swarmtrain deploy config.yml")
    finally:
        lab.start("node2", say=say)


def test_labels(answer: Answer) -> None:
    """Labels that no node has

    `runner.swarm.labels` choose the nodes.
    """
    answer.config(f"runner: {{nodes: 2, swarm: {{labels: {{gpu: h100}}}}, {IMAGE}}}")
    answer("swarmtrain deploy config.yml")


def test_more_nodes_than_there_are(answer: Answer) -> None:
    """More nodes than there are

    In the config, or by `scale`: the run goes on as it is.
    """
    answer.config(f"runner: {{nodes: 4, {IMAGE}}}")
    answer("swarmtrain deploy config.yml")
    answer("swarmtrain deploy config.yml -o runner.nodes=1 --detach", code=0, show=False, changes="home/state")
    answer("swarmtrain scale config --nodes 4")


def test_a_mount_that_one_node_lacks(answer: Answer, lab: Lab) -> None:
    """A mount that one node lacks

    The folder is on the first machine and not on the second. Only the node itself can say so; the deploy is taken back.
    """
    subprocess.run([*lab.enter("node0"), "mkdir", "-p", "/mnt/datasets"], check=True)
    answer.config(
        """
        runner:
          nodes: 2
          docker_config:
            docker_container: registry.lab:5000/swarmtrain:0.1
            docker_mounts: [[/mnt/datasets, /data]]
        """
    )
    answer("swarmtrain deploy config.yml", since="^error:", changes="home/state")
    answer("swarmtrain status config")
