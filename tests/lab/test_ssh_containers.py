"""The SSH launcher with containers, on real engines: the run survives a killed container, fails with a reason, and leaves nothing."""

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
from swarm_helpers import run_docker

from swarmtrain.lab import Lab

pytestmark = pytest.mark.test_all_only("one life of a run in containers over SSH is in the contract")

ROOT = Path(__file__).parents[2]
RUN = "boxes"
NODES = ("node1", "node2")
SECRET = "hush-91be"  # noqa: S105
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


class SshContainerUser:
    """A user on node0, who can reach the other nodes by SSH."""

    def __init__(self, lab: Lab, image: str, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.env = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.data = lab.shared_disk / RUN
        self.data.mkdir(exist_ok=True)
        (folder / "training_code.py").write_text(TRAIN)
        (folder / "token").write_text(SECRET)
        mounts = [[f"/mnt/shared/{RUN}", "/data"]]
        runner = {
            "runner_type": "ssh_docker",
            "hosts": [f"{node} slots=1" for node in NODES],
            "secrets": {"TOKEN": "token"},
            "env": {"OMP_NUM_THREADS": "1"},
            "max_restarts": 1,
            "stop_grace": 15,
            "docker_config": {"docker_container": image, "docker_mounts": mounts},
        }
        topology = {"global_batch_size": 4, "micro_batch_size": 1}
        (folder / f"{RUN}.yml").write_text(yaml.safe_dump({"runner": runner, "topology": topology}))

    def run_command(self, *arguments: str, code: int = 0) -> str:
        """Return the output of a swarmtrain command."""
        argv = [
            *self.lab.build_enter_command("node0"),
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
            str(self.folder),
            sys.executable,
            "-m",
            "swarmtrain",
            *arguments,
        ]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False, timeout=150)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def list_containers(self) -> list[str]:
        """Return the names of the run's containers on all hosts, sorted."""
        listed = ("ps", "-a", "--format", "{{.Names}}", "--filter", f"label=swarmtrain.run={RUN}")
        return sorted(name for node in NODES for name in run_docker(self.lab, *listed, node=node).split())

    def wait_for_step(self, min_step: int) -> int:
        """Return the step as soon as it is at least `min_step`."""
        end = time.monotonic() + 90
        step = 0
        while step < min_step:
            assert time.monotonic() < end, self.run_command("logs", RUN)
            time.sleep(0.1)
            step = int((self.data / "state").read_text()) if (self.data / "state").exists() else 0
        return step


@pytest.fixture
def user(lab: Lab, image: str, tmp_path: Path) -> Iterator[SshContainerUser]:
    user = SshContainerUser(lab, image, tmp_path)
    yield user
    if user.list_containers():
        user.run_command("down", RUN)
    for path in user.data.iterdir():
        path.unlink()


def test_a_run_in_containers_survives_one_and_leaves_none(user: SshContainerUser) -> None:
    user.run_command("deploy", f"{RUN}.yml", "--detach")
    user.wait_for_step(5)
    assert user.list_containers() == [f"{RUN}-node0", f"{RUN}-node1", f"{RUN}-rendezvous"]
    [facts] = json.loads(run_docker(user.lab, "inspect", f"{RUN}-node1", node="node2"))
    assert SECRET not in json.dumps(facts)
    assert (facts["HostConfig"]["NetworkMode"], facts["HostConfig"]["Privileged"]) == ("host", False)
    run_docker(user.lab, "kill", f"{RUN}-node1", node="node2")
    user.wait_for_step(int((user.data / "state").read_text()) + 20)
    user.run_command("stop", RUN)
    saved = (user.data / "state").read_text()
    (user.data / "enough").touch()
    said = user.run_command("deploy", f"{RUN}.yml", "--yes")
    assert f"start at {saved} of world 2, secret of {len(SECRET)}" in said
    assert f"{RUN} is done" in said
    user.run_command("down", RUN)
    assert user.list_containers() == []


def test_a_failure_in_a_container_is_the_exit_code(user: SshContainerUser) -> None:
    said = user.run_command("deploy", f"{RUN}.yml", "-o", "runner.env.FAULT=here", code=3)
    assert "ValueError: no such luck" in said
    user.run_command("down", RUN)
    assert user.list_containers() == []
