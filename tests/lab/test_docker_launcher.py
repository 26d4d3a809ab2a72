"""The Docker launcher on a real engine: the life of a training run in containers outside of any swarm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from swarm_helpers import run_docker

sys.path.insert(0, str(Path(__file__).parents[1] / "howto"))

import page  # lies in the folder of the other pages' tests
from page_runner import PageRunner, Shell

from swarmtrain.lab import Lab
from swarmtrain.protocol import Event

pytestmark = pytest.mark.test_all_only("one life of a run on a single engine is in the contract")

NODE = "node2"
RUN = "alone"
SECRET = "hush-5d2a"  # noqa: S105
# Trains until the file `enough` exists. Its state is on a disk that all nodes share.
TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.protocol.coordinator_client import CoordinatorClient
from swarmtrain.protocol import Event
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo")
state = pathlib.Path("/data/state")
step = int(state.read_text()) if state.exists() else 0
secret = len(pathlib.Path(os.environ["TOKEN_FILE"]).read_text())
print(f"start at {step} of world {dist.get_world_size()}, secret of {secret}, {os.environ['ODD']}")
if step == 0 and os.environ.get("FAULT"):
    raise ValueError("no such luck")
while True:
    flag = torch.tensor([len(asked), dist.get_rank() == 0 and os.path.exists("/data/enough")])
    dist.all_reduce(flag)
    if flag[1]:
        break
    if flag[0]:
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if dist.get_rank() == 0:
        pathlib.Path("/data/new").write_text(str(step))
        os.replace("/data/new", state)
        if step % 5 == 0:
            CoordinatorClient(os.environ["SWARMTRAIN_COORDINATOR"]).post_event(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


class DockerUser:
    """A user with a config, a shell, and an engine."""

    def __init__(self, folder: Path, lab: Lab, image: str) -> None:
        self.folder, self.lab = folder, lab
        self.data = lab.shared_disk / RUN
        self.data.mkdir(mode=0o777)
        self.data.chmod(0o777)
        self.env = {**os.environ, **lab.build_client_environment(), "DOCKER_HOST": lab.get_docker_host(NODE)}
        (folder / "training_code.py").write_text(TRAIN)
        (folder / "token").write_text(SECRET)
        runner = {
            "runner_type": "docker",
            "secrets": {"TOKEN": "token"},
            "stop_grace": 15,
            "max_restarts": 1,
            "env": {"OMP_NUM_THREADS": "1", "ODD": "$HOME {{.Node.ID}} a=b"},
            "docker_config": {"docker_container": image, "docker_mounts": [[str(self.data), "/data"]]},
        }
        topology = {"global_batch_size": 4, "micro_batch_size": 1}
        (folder / f"{RUN}.yml").write_text(yaml.safe_dump({"runner": runner, "topology": topology}))

    def run_command(self, *arguments: str, code: int = 0) -> str:
        """Return the output of a swarmtrain command."""
        argv = [sys.executable, "-m", "swarmtrain", *arguments]
        done = subprocess.run(argv, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def deploy(self, *options: str, code: int = 0) -> str:
        return self.run_command("deploy", f"{RUN}.yml", *options, code=code)

    def run_docker(self, *arguments: str) -> str:
        return run_docker(self.lab, *arguments, node=NODE)

    def read_events(self, kind: str) -> list[Event]:
        lines = self.run_docker("logs", f"{RUN}-rendezvous").splitlines()
        return [event for line in lines if (event := Event.from_line(line)) and event.kind == kind]

    def wait_for_event(self, kind: str, condition: Callable[[Event], bool] = lambda _: True) -> Event:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            if found := [event for event in self.read_events(kind) if condition(event)]:
                return found[-1]
            time.sleep(0.2)
        pytest.fail(f"no {kind}\n" + self.run_docker("logs", f"{RUN}-rendezvous") + self.run_command("logs", RUN))

    def list_leftovers(self) -> list[str]:
        """Return the names of the run's containers and networks."""
        containers = self.run_docker("ps", "-a", "--format", "{{.Names}}", "--filter", f"name={RUN}")
        networks = self.run_docker("network", "ls", "--format", "{{.Name}}", "--filter", f"name={RUN}")
        return [*containers.split(), *networks.split()]


@pytest.fixture
def user(lab: Lab, image: str, tmp_path: Path) -> Iterator[DockerUser]:
    user = DockerUser(tmp_path, lab, image)
    yield user
    if user.list_leftovers():
        user.run_command("down", RUN)
    shutil.rmtree(user.data)
    assert user.list_leftovers() == []


def test_a_run_lives_recovers_is_scaled_stopped_resumed_followed_and_removed(user: DockerUser) -> None:
    user.run_command("plan", f"{RUN}.yml")
    assert user.list_leftovers() == []
    user.deploy("--detach")
    assert "replace node0: has changed" in user.run_command("plan", f"{RUN}.yml", "-o", "runner.env.MORE=here")
    assert "node0: " not in user.run_command("plan", f"{RUN}.yml")
    user.wait_for_event("progress")
    facts = user.run_docker("inspect", f"{RUN}-node0", f"{RUN}-rendezvous")
    assert SECRET not in facts
    assert SECRET not in user.run_docker("top", f"{RUN}-node0", "-ef")
    assert {item["HostConfig"]["Privileged"] for item in json.loads(facts)} == {False}
    assert [item["HostConfig"]["PortBindings"] or {} for item in json.loads(facts)] == [{}, {}]

    user.run_docker("kill", f"{RUN}-node0")
    user.run_docker("start", f"{RUN}-node0")  # the engine does not restart a container that was killed by hand
    last = int((user.data / "state").read_text())
    user.wait_for_event("progress", lambda event: event.data["step"] > last + 5)

    user.deploy("--detach", "--yes", "-o", "runner.max_restarts=2")  # another coordinator; the run resumes where it was
    user.wait_for_event("progress")
    user.run_command("scale", RUN, "--nodes", "2", "--yes")
    user.wait_for_event("world", lambda event: event.data["nodes"] == 2)
    status = json.loads(user.run_command("status", RUN, "--json"))
    assert {task["node"]: task["state"] for task in status["tasks"]} == {"node0": "running", "node1": "running", "rendezvous": "running"}
    user.run_command("stop", RUN)
    saved = (user.data / "state").read_text()
    user.run_command("scale", RUN, "--nodes", "1", "--yes")
    user.wait_for_event("progress", lambda event: event.data["step"] > int(saved))
    user.run_command("stop", RUN)
    saved = (user.data / "state").read_text()
    (user.data / "enough").touch()
    said = user.deploy("--yes", "-o", "runner.max_restarts=3")
    assert f"start at {saved} of world 1, secret of {len(SECRET)}, $HOME {{{{.Node.ID}}}} a=b" in said
    assert "its node has finished" in said
    assert f"start at {saved} of world 1" in user.run_command("logs", RUN, "--follow")
    user.run_command("down", RUN)
    assert user.list_leftovers() == []
    user.run_command("status", RUN, code=1)


def test_a_failure_is_the_exit_code(user: DockerUser) -> None:
    said = user.deploy("-o", "runner.env.FAULT=here", code=3)
    assert "alone failed with exit code 1: node0 rank 0: ValueError: no such luck" in said
    user.run_command("down", RUN)
    assert user.list_leftovers() == []


def test_the_file_for_docker_compose_makes_the_same_containers(user: DockerUser) -> None:
    user.run_command("generate", f"{RUN}.yml", "-o", "runner.docker_config.cpus=0.5", "-o", "runner.docker_config.memory=1g")
    document: dict[str, Any] = yaml.safe_load((user.folder / "compose/generated.yml").read_text())
    node = document["services"]["node0"]
    assert not any("deploy" in service for service in document["services"].values())
    assert (document["name"], node["container_name"], node["cpus"], node["mem_limit"]) == (RUN, f"{RUN}-node0", "0.5", str(2**30))
    assert node["environment"]["ODD"] == "$$HOME {{.Node.ID}} a=b"
    user.deploy("--detach", "-o", "runner.docker_config.cpus=0.5", "-o", "runner.docker_config.memory=1g")
    [made] = json.loads(user.run_docker("inspect", f"{RUN}-node0"))
    assert made["Config"]["Labels"]["swarmtrain.container"] == node["labels"]["swarmtrain.container"]
    assert (made["HostConfig"]["NanoCpus"], made["HostConfig"]["Memory"]) == (500_000_000, 2**30)
    assert made["HostConfig"]["RestartPolicy"]["Name"] == node["restart"] == "on-failure"
    user.run_command("down", RUN)


def test_the_page(user: DockerUser, image: str) -> None:
    text = page.read_page("docs/how-to/one-machine.md")
    folder = user.folder / "project"
    folder.mkdir()
    env = {**user.env, "PATH": f"{Path(sys.executable).parent}:{user.env['PATH']}", "OMP_NUM_THREADS": "1"}
    shell = Shell(folder, user.folder / "transcript", env)
    try:
        PageRunner([shell]).run_steps(text)
    finally:
        shell.close()
    assert user.run_docker("ps", "-aq", "--filter", "name=one-") == ""
