"""Who reaches the ports of a run on a swarm: only its own containers, or on the host network everybody, but only with the run's key."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from intruder import assert_run_is_undisturbed, attack_from
from swarm_helpers import DISCARD, RUN, run_docker

from swarmtrain.lab import Lab
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan, build_plan
from swarmtrain.protocol import RUN_KEY_NAME, Event
from swarmtrain.render.stack_document import render_stack, write_stack

HOST_NETWORK = {"network": "host"}
PORT = 29501
TRAIN = b"""
import os, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol import Event
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo")
step = 0
while True:
    flag = torch.tensor([len(asked)])
    dist.all_reduce(flag)
    if flag[0]:
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if dist.get_rank() == 0 and step % 5 == 0:
        CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"]).post_event(Event("progress", {"step": step}))
"""


def find_container(lab: Lab, service: str, node: str) -> str:
    """Return the id of the running container of a service on `node`, once it exists."""
    end = time.monotonic() + 30
    while not (found := run_docker(lab, "ps", "-q", "--filter", f"name={service}.", node=node).strip()):
        assert time.monotonic() < end, service
        time.sleep(0.2)
    return found


def connect(lab: Lab, container: str, node: str, address: str) -> bool:
    """Return whether a program in `container` can connect to `address`."""
    program = f"import socket; socket.create_connection(('{address}', {PORT}), 3)"
    argv = ["docker", "-H", lab.get_docker_host(node), "exec", container, "python3", "-c", program]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def test_a_container_of_another_stack_cannot_connect(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    """On the run's own overlay network, which is not attachable. So a run there needs no key."""
    plan = plan_run(nodes=2)
    assert not render_stack(plan).key_file
    launcher.deploy_run(plan, DISCARD)
    other = build_plan(plan.config, launcher.read_inventory(plan.config.runner), plan.cargo, run="other")
    try:
        launcher.deploy_run(other, DISCARD)
        server = find_container(lab, f"{RUN}_node0", "node0")
        run_docker(lab, "exec", "--detach", server, "python3", "-m", "http.server", str(PORT))
        [facts] = json.loads(run_docker(lab, "inspect", server))
        address = facts["NetworkSettings"]["Networks"][f"{RUN}_training"]["IPAddress"]
        own = find_container(lab, f"{RUN}_node1", "node1")
        end = time.monotonic() + 20
        while not connect(lab, own, "node1", address):
            assert time.monotonic() < end, "the run's own container cannot connect either"
        for service, node in (("other_node0", "node0"), ("other_node1", "node1")):
            assert not connect(lab, find_container(lab, service, node), node, address)
        image = plan.config.runner.docker_config.docker_container
        argv = ["docker", "-H", lab.get_docker_host("node0"), "run", "--rm", "--network", f"{RUN}_training", image, "true"]
        refused = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert refused.returncode
        assert "not manually attachable" in refused.stderr
    finally:
        launcher.tear_down_run("other", DISCARD)


def wait_for_event(launcher: SwarmLauncher, kind: str) -> Event:
    """Return the newest event of this kind, once there is one."""
    end = time.monotonic() + 90
    while not (found := [event for event in launcher.read_events(RUN) if event.kind == kind]):
        assert time.monotonic() < end, [line.text for line in launcher.stream_logs(RUN, follow=False)]
        time.sleep(0.3)
    return found[-1]


def read_key_id(lab: Lab) -> str:
    return run_docker(lab, "secret", "inspect", f"{RUN}_{RUN_KEY_NAME}", "--format", "{{.ID}}").strip()


def test_the_key_is_made_once_and_never_read(lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan]) -> None:
    plan = plan_run(nodes=2, swarm=HOST_NETWORK)
    launcher.deploy_run(plan, DISCARD)
    key_id = read_key_id(lab)
    assert launcher.plan_changes(plan_run(nodes=2, swarm=HOST_NETWORK)) == []
    # A second client, which has nothing but access to the manager.
    second = SwarmLauncher(lab.get_docker_host("node0"))
    scaled = plan_scaled_run(second, RUN, ScaleRequest(3))
    assert [str(step) for step in second.plan_changes(scaled)] == [f"create service {RUN}_node2: is new"]
    second.deploy_run(scaled, DISCARD)
    assert second.plan_changes(scaled) == []
    assert read_key_id(lab) == key_id


def test_docker_stack_deploy_uses_the_key_that_generate_has_written(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = plan_run(nodes=1, swarm=HOST_NETWORK)
    key_file = tmp_path / "generated" / RUN_KEY_NAME
    write_stack(render_stack(plan), tmp_path / "generated.yml")
    key = key_file.read_bytes()
    assert (key_file.stat().st_mode & 0o777, (tmp_path / "generated" / ".gitignore").read_text()) == (0o600, f"{RUN_KEY_NAME}\n")
    write_stack(render_stack(plan), tmp_path / "generated.yml")
    assert key_file.read_bytes() == key
    for _ in range(2):
        run_docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN)
    assert launcher.plan_changes(plan) == []
    scaled = plan_scaled_run(launcher, RUN, ScaleRequest(2))
    assert [str(step) for step in launcher.plan_changes(scaled)] == [f"create service {RUN}_node1: is new"]


@pytest.mark.test_all_only("trains with the real image; tests/unit/test_run_key.py has each attack")
def test_an_intruder_on_the_host_network(
    lab: Lab, launcher: SwarmLauncher, plan_run: Callable[..., Plan], image: str, tmp_path: Path
) -> None:
    plan = plan_run(nodes=2, min_nodes=2, script=TRAIN, image=image, swarm=HOST_NETWORK, env={"OMP_NUM_THREADS": "1"})
    write_stack(render_stack(plan), tmp_path / "generated.yml")
    key = (tmp_path / "generated" / RUN_KEY_NAME).read_bytes()
    assert plan.coordinator_machine is not None
    coordinator = f"{plan.coordinator_machine.address}:{plan.master_port}"
    # The attack begins before there is a coordinator. It has the key only to record signed requests, as one who listens would.
    with attack_from(lab, "node2", key, coordinator, seconds=30):
        run_docker(lab, "stack", "deploy", "-c", str(tmp_path / "generated.yml"), RUN)
        wait_for_event(launcher, "progress")
    step = launcher.read_events(RUN)[-1].data.get("step", 0)
    end = time.monotonic() + 60
    while wait_for_event(launcher, "progress").data["step"] < step + 100:
        assert time.monotonic() < end
        time.sleep(0.5)
    assert_run_is_undisturbed(launcher.read_events(RUN))
    assert "Traceback" not in run_docker(lab, "service", "logs", f"{RUN}_rendezvous")
