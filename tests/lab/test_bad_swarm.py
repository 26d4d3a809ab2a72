"""An engine, a swarm, networks and stacks that are not as a run needs them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

import pytest
from answers import Answer
from stand_in import docker, say

from swarmtrain.lab import Lab

CHAPTER = "The engine and the swarm"
pytestmark = pytest.mark.usefixtures("on_the_lab")

IMAGE = "docker_config: {docker_container: 'registry.lab:5000/swarmtrain:0.1'}"


def test_a_worker(answer: Answer, lab: Lab) -> None:
    """An engine that is a worker

    It runs containers, and knows nothing of the swarm's services.
    """
    answer.config(f"runner: {{nodes: 2, {IMAGE}}}")
    answer.env["DOCKER_HOST"] = lab.docker_host("node1")
    answer("swarmtrain plan config.yml")
    answer("swarmtrain status")


def test_swarms_that_are_none(answer: Answer, new_lab: Callable[[str], Lab]) -> None:
    """An engine in no swarm, two machines of one name, and a swarm that has lost its managers

    Three things that happen while a swarm is set up, in the order in which they happen.
    """
    bare = new_lab("none")
    bare.up(2, bare=True, say=say)
    answer.same(f"{bare.docker_host('node0').rpartition('/node0/')[0]}/node\\d/docker.sock", "unix:///var/run/docker.sock")
    answer.same("\\b[0-9a-z]{25}\\b", "ID")
    answer.config(f"runner: {{hosts: [node0], {IMAGE}}}")
    answer.env["DOCKER_HOST"] = bare.docker_host("node0")
    answer("swarmtrain deploy config.yml")

    subprocess.run([*bare.enter("node1"), "hostname", "node0"], check=True)
    addresses = [node.address for node in bare.status()]
    docker(bare, "swarm", "init", "--advertise-addr", addresses[0])
    token = docker(bare, "swarm", "join-token", "--quiet", "manager").strip()
    docker(bare, "swarm", "join", "--advertise-addr", addresses[1], "--token", token, f"{addresses[0]}:2377", node="node1")
    answer.say("The second machine is a copy of the first, and has its name.")
    answer("swarmtrain deploy config.yml")

    bare.kill("node1", say=say)
    end = time.monotonic() + 60
    while subprocess.run(["docker", "-H", bare.docker_host("node0"), "node", "ls"], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < end
        time.sleep(0.5)
    answer.say("Both were made managers, and one lost its power. More than half of them are needed: make one manager, or three.")
    answer("swarmtrain deploy config.yml", timeout=120)
    answer("swarmtrain status", timeout=120)
    bare.down(say=say)


def test_a_network_with_other_options(answer: Answer, lab: Lab) -> None:
    """A network with other options

    The run is up, and its config now wants a network that Swarm cannot make of the one that is there.
    """
    answer.config(f"runner: {{nodes: 1, {IMAGE}}}")
    answer("swarmtrain deploy config.yml --detach", code=0, since="^bringing", changes="home/state", show=False)
    answer("swarmtrain deploy config.yml -o runner.swarm.mtu=1400 -o runner.swarm.encrypted=true", since="^error:")
    answer("swarmtrain plan config.yml -o runner.swarm.mtu=1400", since="^error:", show=False)


def test_a_network_that_is_not_there(answer: Answer, lab: Lab) -> None:
    """A network of your own that is not there

    `runner.swarm.network` names a network that nobody has made, or one that only this machine has.
    """
    answer.config(f"runner: {{nodes: 1, swarm: {{network: site}}, {IMAGE}}}")
    answer("swarmtrain deploy config.yml", since="^error:")
    answer.situation("docker network create site")
    try:
        answer("swarmtrain deploy config.yml", since="^error:")
    finally:
        docker(lab, "network", "rm", "site")


def test_a_stack_of_somebody_else(answer: Answer, lab: Lab) -> None:
    """A stack of somebody else

    One that has the run's name and is no run of swarmtrain. It is never touched.
    """
    answer.file(
        "web.yml",
        "version: '3.8'\nservices: {web: {image: registry.lab:5000/swarmtrain:0.1, deploy: {replicas: 0}}}\n",
    )
    answer.config(f"runner: {{nodes: 1, {IMAGE}}}")
    answer.situation("docker stack deploy -c web.yml config")
    answer("swarmtrain deploy config.yml", since="^error:")
    answer("swarmtrain down config")
    assert "config_web" in docker(lab, "service", "ls")
