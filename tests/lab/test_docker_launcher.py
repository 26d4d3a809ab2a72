"""The Docker launcher on a real engine: a training run's whole life in containers that no swarm knows of."""

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
from stand_in import docker

sys.path.insert(0, str(Path(__file__).parents[1] / "howto"))

import page  # lies beside the tests of the other pages
from reader import Reader, Shell

from swarmtrain.lab import Lab
from swarmtrain.wire import Event

pytestmark = pytest.mark.test_all_only("one life of a run on a single engine is in the contract")

NODE = "node2"
RUN = "alone"
HUSH = "hush-5d2a"
# Trains until the file `enough` is there. Its state is on a disk that all nodes share.
TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from swarmtrain.board import Board
from swarmtrain.wire import Event
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
            Board(os.environ["SWARMTRAIN_BOARD"]).post(Event("progress", {"step": step}))
dist.barrier()
dist.destroy_process_group()
"""


class User:
    """Somebody with a config, a shell, and an engine."""

    def __init__(self, folder: Path, lab: Lab, image: str) -> None:
        self.folder, self.lab = folder, lab
        self.data = lab.shared / RUN
        self.data.mkdir(mode=0o777)
        self.data.chmod(0o777)
        self.env = {**os.environ, **lab.env(), "DOCKER_HOST": lab.docker_host(NODE)}
        (folder / "training_code.py").write_text(TRAIN)
        (folder / "token").write_text(HUSH)
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

    def swarmtrain(self, *arguments: str, code: int = 0) -> str:
        """Return what the command printed."""
        argv = [sys.executable, "-m", "swarmtrain", *arguments]
        done = subprocess.run(argv, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def deploy(self, *options: str, code: int = 0) -> str:
        return self.swarmtrain("deploy", f"{RUN}.yml", *options, code=code)

    def docker(self, *arguments: str) -> str:
        return docker(self.lab, *arguments, node=NODE)

    def events(self, kind: str) -> list[Event]:
        lines = self.docker("logs", f"{RUN}-rendezvous").splitlines()
        return [event for line in lines if (event := Event.from_line(line)) and event.kind == kind]

    def until(self, kind: str, where: Callable[[Event], bool] = lambda _: True) -> Event:
        end = time.monotonic() + 90
        while time.monotonic() < end:
            if found := [event for event in self.events(kind) if where(event)]:
                return found[-1]
            time.sleep(0.2)
        pytest.fail(f"no {kind}\n" + self.docker("logs", f"{RUN}-rendezvous") + self.swarmtrain("logs", RUN))

    def left(self) -> list[str]:
        """Return the names of containers and networks that are there."""
        containers = self.docker("ps", "-a", "--format", "{{.Names}}", "--filter", f"name={RUN}")
        networks = self.docker("network", "ls", "--format", "{{.Name}}", "--filter", f"name={RUN}")
        return [*containers.split(), *networks.split()]


@pytest.fixture
def user(lab: Lab, image: str, tmp_path: Path) -> Iterator[User]:
    made = User(tmp_path, lab, image)
    yield made
    if made.left():
        made.swarmtrain("down", RUN)
    shutil.rmtree(made.data)
    assert made.left() == []


def test_a_run_lives_recovers_is_scaled_stopped_resumed_followed_and_removed(user: User) -> None:
    user.swarmtrain("plan", f"{RUN}.yml")
    assert user.left() == []
    user.deploy("--detach")
    assert "replace node0: has changed" in user.swarmtrain("plan", f"{RUN}.yml", "-o", "runner.env.MORE=here")
    assert "node0: " not in user.swarmtrain("plan", f"{RUN}.yml")
    user.until("progress")
    facts = user.docker("inspect", f"{RUN}-node0", f"{RUN}-rendezvous")
    assert HUSH not in facts
    assert HUSH not in user.docker("top", f"{RUN}-node0", "-ef")
    assert {item["HostConfig"]["Privileged"] for item in json.loads(facts)} == {False}
    assert [item["HostConfig"]["PortBindings"] or {} for item in json.loads(facts)] == [{}, {}]

    user.docker("kill", f"{RUN}-node0")
    user.docker("start", f"{RUN}-node0")  # to the engine a kill by hand is somebody's wish
    last = int((user.data / "state").read_text())
    user.until("progress", lambda event: event.data["step"] > last + 5)

    user.deploy("--detach", "--yes", "-o", "runner.max_restarts=2")  # another board, and the run begins anew where it was
    user.until("progress")
    user.swarmtrain("scale", RUN, "--nodes", "2", "--yes")
    user.until("world", lambda event: event.data["nodes"] == 2)
    status = json.loads(user.swarmtrain("status", RUN, "--json"))
    assert {task["node"]: task["state"] for task in status["tasks"]} == {"node0": "running", "node1": "running", "rendezvous": "running"}
    user.swarmtrain("stop", RUN)
    saved = (user.data / "state").read_text()
    user.swarmtrain("scale", RUN, "--nodes", "1", "--yes")
    user.until("progress", lambda event: event.data["step"] > int(saved))
    user.swarmtrain("stop", RUN)
    saved = (user.data / "state").read_text()
    (user.data / "enough").touch()
    said = user.deploy("--yes", "-o", "runner.max_restarts=3")
    assert f"start at {saved} of world 1, secret of {len(HUSH)}, $HOME {{{{.Node.ID}}}} a=b" in said
    assert "its node has finished" in said
    assert f"start at {saved} of world 1" in user.swarmtrain("logs", RUN, "--follow")
    user.swarmtrain("down", RUN)
    assert user.left() == []
    user.swarmtrain("status", RUN, code=1)


def test_a_failure_is_the_exit_code(user: User) -> None:
    said = user.deploy("-o", "runner.env.FAULT=here", code=3)
    assert "alone failed with exit code 1: node0 rank 0: ValueError: no such luck" in said
    user.swarmtrain("down", RUN)
    assert user.left() == []


def test_the_file_for_docker_compose_makes_the_same_containers(user: User) -> None:
    user.swarmtrain("generate", f"{RUN}.yml", "-o", "runner.docker_config.cpus=0.5", "-o", "runner.docker_config.memory=1g")
    document: dict[str, Any] = yaml.safe_load((user.folder / "compose/generated.yml").read_text())
    node = document["services"]["node0"]
    assert not any("deploy" in service for service in document["services"].values())
    assert (document["name"], node["container_name"], node["cpus"], node["mem_limit"]) == (RUN, f"{RUN}-node0", "0.5", str(2**30))
    assert node["environment"]["ODD"] == "$$HOME {{.Node.ID}} a=b"
    user.deploy("--detach", "-o", "runner.docker_config.cpus=0.5", "-o", "runner.docker_config.memory=1g")
    [made] = json.loads(user.docker("inspect", f"{RUN}-node0"))
    assert made["Config"]["Labels"]["swarmtrain.container"] == node["labels"]["swarmtrain.container"]
    assert (made["HostConfig"]["NanoCpus"], made["HostConfig"]["Memory"]) == (500_000_000, 2**30)
    assert made["HostConfig"]["RestartPolicy"]["Name"] == node["restart"] == "on-failure"
    user.swarmtrain("down", RUN)


def test_the_page(user: User, image: str) -> None:
    text = page.read("docs/how-to/one-machine.md")
    folder = user.folder / "project"
    folder.mkdir()
    env = {**user.env, "PATH": f"{Path(sys.executable).parent}:{user.env['PATH']}", "OMP_NUM_THREADS": "1"}
    shell = Shell(folder, user.folder / "transcript", env)
    try:
        Reader([shell]).follow(text)
    finally:
        shell.close()
    assert user.docker("ps", "-aq", "--filter", "name=one-") == ""
