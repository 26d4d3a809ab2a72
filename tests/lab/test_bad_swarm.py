"""An engine, a swarm, networks and stacks in a state that a run cannot use."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest
from error_cases import ErrorCase
from swarm_helpers import print_line, run_docker

from swarmtrain.lab import Lab

CHAPTER = "The engine and the swarm"
pytestmark = pytest.mark.usefixtures("connect_to_lab")

IMAGE = "docker_config: {docker_container: 'registry.lab:5000/swarmtrain:0.1'}"


def test_a_worker(error_case: ErrorCase, lab: Lab) -> None:
    """Docker engine is a swarm worker

    A worker runs containers, but does not know the swarm's services.
    """
    error_case.write_config(f"runner: {{nodes: 2, {IMAGE}}}")
    error_case.env["DOCKER_HOST"] = lab.get_docker_host("node1")
    error_case("swarmtrain plan config.yml")
    error_case("swarmtrain status")


def test_engines_without_a_usable_swarm(error_case: ErrorCase, create_lab: Callable[[str], Lab]) -> None:
    """Engine not in a swarm, duplicate host name, or lost quorum

    These three errors happen while a swarm is set up, in this order.
    """
    bare = create_lab("none")
    bare.bring_up(2, bare=True, report_progress=print_line)
    error_case.add_replacement(
        f"{bare.get_docker_host('node0').rpartition('/node0/')[0]}/node\\d/docker.sock", "unix:///var/run/docker.sock"
    )
    error_case.add_replacement("\\b[0-9a-z]{25}\\b", "ID")
    error_case.write_config(f"runner: {{hosts: [node0], {IMAGE}}}")
    error_case.env["DOCKER_HOST"] = bare.get_docker_host("node0")
    error_case("swarmtrain deploy config.yml")

    subprocess.run([*bare.build_enter_command("node1"), "hostname", "node0"], check=True)
    addresses = [node.address for node in bare.get_status()]
    run_docker(bare, "swarm", "init", "--advertise-addr", addresses[0])
    token = run_docker(bare, "swarm", "join-token", "--quiet", "manager").strip()
    run_docker(bare, "swarm", "join", "--advertise-addr", addresses[1], "--token", token, f"{addresses[0]}:2377", node="node1")
    error_case.add_paragraph("The second machine is a copy of the first, and has the same host name.")
    error_case("swarmtrain deploy config.yml")

    bare.power_off_node("node1", report_progress=print_line)
    end = time.monotonic() + 60
    while subprocess.run(["docker", "-H", bare.get_docker_host("node0"), "node", "ls"], capture_output=True, check=False).returncode == 0:
        assert time.monotonic() < end
        time.sleep(0.5)
    error_case.add_paragraph(
        "Both machines are managers, and one is powered off. A swarm needs more than half of its managers: use one manager, or three."
    )
    error_case("swarmtrain deploy config.yml", timeout=120)
    error_case("swarmtrain status", timeout=120)
    bare.tear_down(report_progress=print_line)


def test_a_network_with_other_options(error_case: ErrorCase, lab: Lab) -> None:
    """Network exists with other options

    The run is up, and its config now requires other network options. Swarm cannot apply them to the existing network.
    """
    error_case.write_config(f"runner: {{nodes: 1, {IMAGE}}}")
    error_case("swarmtrain deploy config.yml --detach", code=0, start_pattern="^deploying", allowed_changes="home/state", show=False)
    # Commands that read the events of a run that is up also record them.
    options: dict[str, Any] = {"start_pattern": "^error:", "allowed_changes": "home/state/.*/history"}
    error_case("swarmtrain deploy config.yml -o runner.swarm.mtu=1400 -o runner.swarm.encrypted=true", **options)
    error_case("swarmtrain plan config.yml -o runner.swarm.mtu=1400", **options, show=False)


def test_a_network_that_is_not_there(error_case: ErrorCase, lab: Lab) -> None:
    """Network does not exist

    `runner.swarm.network` names a network that does not exist, or that exists only on this machine.
    """
    error_case.write_config(f"runner: {{nodes: 1, swarm: {{network: site}}, {IMAGE}}}")
    error_case("swarmtrain deploy config.yml", start_pattern="^error:")
    error_case.run_setup("docker network create site")
    try:
        error_case("swarmtrain deploy config.yml", start_pattern="^error:")
    finally:
        run_docker(lab, "network", "rm", "site")


def test_a_stack_of_somebody_else(error_case: ErrorCase, lab: Lab) -> None:
    """Not a run of swarmtrain

    A stack has the name of the run, but is not a run of swarmtrain. swarmtrain never changes or removes such a stack.
    """
    error_case.write_file(
        "web.yml",
        "version: '3.8'\nservices: {web: {image: registry.lab:5000/swarmtrain:0.1, deploy: {replicas: 0}}}\n",
    )
    error_case.write_config(f"runner: {{nodes: 1, {IMAGE}}}")
    error_case.run_setup("docker stack deploy -c web.yml config")
    error_case("swarmtrain deploy config.yml", start_pattern="^error:")
    error_case("swarmtrain down config")
    assert "config_web" in run_docker(lab, "service", "ls")
