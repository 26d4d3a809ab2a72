"""The launcher over SSH with containers, on real engines: its run survives a container, fails with a reason, and leaves nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from stand_in import docker

from swarmtrain.lab import Lab

pytestmark = pytest.mark.test_all_only("one life of a run in containers over SSH is in the contract")

ROOT = Path(__file__).parents[2]
RUN = "boxes"
NODES = ("node1", "node2")
HUSH = "hush-91be"
TRAIN = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo")
shared = pathlib.Path("/data")
state = shared / "state"
step = int(state.read_text()) if state.exists() else 0
print(f"start at {step} of world {dist.get_world_size()}, secret of {len(pathlib.Path(os.environ['TOKEN_FILE']).read_text())}")
if "FAULT" in os.environ:
    raise ValueError("no such luck")
while True:
    flag = torch.tensor([len(asked), dist.get_rank() == 0 and (shared / "enough").exists()])
    dist.all_reduce(flag)
    if flag[1]:
        break
    if flag[0]:
        dist.destroy_process_group()
        sys.exit(75)
    time.sleep(0.02)
    step += 1
    if dist.get_rank() == 0:
        (shared / "new").write_text(str(step))
        os.replace(shared / "new", state)
dist.barrier()
dist.destroy_process_group()
"""


class User:
    """Somebody at node0, whose ssh leads to the others."""

    def __init__(self, lab: Lab, image: str, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.data = lab.shared / RUN
        self.data.mkdir(exist_ok=True)
        (folder / "training_code.py").write_text(TRAIN)
        (folder / "token").write_text(HUSH)
        mounts = [[f"/mnt/shared/{RUN}", "/data"]]
        runner = {
            "runner_type": "pdsh_docker",
            "hosts": [f"{node} slots=1" for node in NODES],
            "secrets": {"TOKEN": "token"},
            "env": {"OMP_NUM_THREADS": "1"},
            "max_restarts": 1,
            "stop_grace": 15,
            "docker_config": {"docker_container": image, "docker_mounts": mounts},
        }
        topology = {"global_batch_size": 4, "micro_batch_size": 1}
        (folder / f"{RUN}.yml").write_text(yaml.safe_dump({"runner": runner, "topology": topology}))

    def swarmtrain(self, *words: str, code: int = 0) -> str:
        """Return what a command printed."""
        argv = [*self.lab.enter("node0"), "sh", "-c", 'cd "$0" && exec "$@"', str(self.folder), sys.executable, "-m", "swarmtrain", *words]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=150)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def containers(self) -> list[str]:
        """Return the names of the run's containers on all hosts, sorted."""
        listed = ("ps", "-a", "--format", "{{.Names}}", "--filter", f"label=swarmtrain.run={RUN}")
        return sorted(name for node in NODES for name in docker(self.lab, *listed, node=node).split())

    def until_step(self, least: int) -> int:
        """Return the step when it has come to `least`."""
        end = time.monotonic() + 90
        step = 0
        while step < least:
            assert time.monotonic() < end, self.swarmtrain("logs", RUN)
            time.sleep(0.1)
            step = int((self.data / "state").read_text()) if (self.data / "state").exists() else 0
        return step


@pytest.fixture
def user(lab: Lab, image: str, tmp_path: Path) -> Iterator[User]:
    made = User(lab, image, tmp_path)
    yield made
    if made.containers():
        made.swarmtrain("down", RUN)
    for path in made.data.iterdir():
        path.unlink()


def test_a_run_in_containers_survives_one_and_leaves_none(user: User) -> None:
    user.swarmtrain("deploy", f"{RUN}.yml", "--detach")
    user.until_step(5)
    assert user.containers() == [f"{RUN}-node0", f"{RUN}-node1", f"{RUN}-rendezvous"]
    [facts] = json.loads(docker(user.lab, "inspect", f"{RUN}-node1", node="node2"))
    assert HUSH not in json.dumps(facts)
    assert (facts["HostConfig"]["NetworkMode"], facts["HostConfig"]["Privileged"]) == ("host", False)
    docker(user.lab, "kill", f"{RUN}-node1", node="node2")
    user.until_step(int((user.data / "state").read_text()) + 20)
    user.swarmtrain("stop", RUN)
    saved = (user.data / "state").read_text()
    (user.data / "enough").touch()
    said = user.swarmtrain("deploy", f"{RUN}.yml", "--yes")
    assert f"start at {saved} of world 2, secret of {len(HUSH)}" in said
    assert f"{RUN} is done" in said
    user.swarmtrain("down", RUN)
    assert user.containers() == []


def test_a_failure_in_a_container_is_the_exit_code(user: User) -> None:
    said = user.swarmtrain("deploy", f"{RUN}.yml", "-o", "runner.env.FAULT=here", code=3)
    assert "ValueError: no such luck" in said
    user.swarmtrain("down", RUN)
    assert user.containers() == []
