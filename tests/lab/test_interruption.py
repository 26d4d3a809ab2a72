"""Ctrl-C, SIGTERM and a closed terminal on a real swarm: before every change that a command makes, and while it waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupt import CHANGES, EFFECTS, ROOT, SIGNALS, at_each, at_line
from stand_in import RUN, say

from swarmtrain.lab import Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import observe, removal

CONFIG = """
runner:
  nodes: 2
  min_nodes: 1
  max_nodes: 3
  stop_grace: 10
  docker_config: {docker_container: "%s"}
"""


@pytest.fixture
def project(lab: Lab, engine: Engine, stand_in: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DOCKER_HOST", lab.docker_host("node0"))
    (tmp_path / "training_code.py").write_text("train()\n")
    (tmp_path / f"{RUN}.yml").write_text(CONFIG % stand_in)
    yield tmp_path
    removal.take_down(engine, RUN, say)


def swarmtrain(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "swarmtrain", *argv], cwd=cwd, capture_output=True, text=True, check=False, env=env)


def left(engine: Engine) -> list[str]:
    """Return all that the swarm has of the run, whatever its label, but for tasks that have ended."""
    kinds = {"services": "Name", "configs": "Name", "secrets": "Name"}
    names = [item["Spec"]["Name"] for kind in kinds for item in engine.listing(f"/{kind}")]
    names += [item["Name"] for item in engine.listing("/networks")]
    running = [f"task {task.id}" for task in observe.tasks(engine, RUN) if not task.over]
    return [name for name in [*names, *running] if RUN in name or name.startswith("task ")]


def whole(project: Path, engine: Engine) -> bool:
    """Say whether the run is as its config says, and nobody holds the right to change it."""
    told = swarmtrain("plan", f"{RUN}.yml", cwd=project).stderr
    return told.endswith("a deploy would change nothing\n") and f"{RUN}_lock" not in left(engine)


def test_a_first_deploy_leaves_nothing_or_the_run(project: Path, engine: Engine) -> None:
    gone = 0
    for ended in at_each(CHANGES, "deploy", f"{RUN}.yml", "--detach", cwd=project):
        if left(engine):
            assert whole(project, engine), ended.err
        else:
            gone += 1
            assert "interrupted: nothing of it is left" in ended.err
    assert gone >= 5
    assert whole(project, engine)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_containers_start_and_while_they_are_followed(project: Path, engine: Engine, number: int) -> None:
    ended = at_line("preparing", "deploy", f"{RUN}.yml", cwd=project, number=number)
    assert (ended.code, left(engine)) == (130, []), ended.err
    ended = at_line("Ctrl-C detaches", "deploy", f"{RUN}.yml", cwd=project, number=number, after=0.5)
    assert (ended.code, len(observe.services(engine, RUN))) == (130, 3)
    assert f"detached; {RUN} goes on" in ended.err
    assert "Traceback" not in ended.err


def test_a_change_is_taken_up_by_the_same_command_again(project: Path, engine: Engine) -> None:
    assert swarmtrain("deploy", f"{RUN}.yml", "--detach", cwd=project).returncode == 0
    for ended in at_each(CHANGES, "deploy", f"{RUN}.yml", "--detach", "--yes", "-o", "trainer.seed=7", cwd=project):
        if ended.interrupted:
            assert "interrupted: the same command again makes the rest of the change" in ended.err
            assert len(observe.services(engine, RUN)) == 3
    assert swarmtrain("plan", f"{RUN}.yml", "-o", "trainer.seed=7", cwd=project).stderr.endswith("a deploy would change nothing\n")


def test_scale_stop_and_down_can_be_repeated(project: Path, engine: Engine) -> None:
    assert swarmtrain("deploy", f"{RUN}.yml", "--detach", cwd=project).returncode == 0
    # The stand-in forms no world, so this is left by hand.
    ended = at_line("waiting for a world", "scale", "--nodes", "3", cwd=project)
    assert (ended.code, f"interrupted: {RUN} goes on" in ended.err) == (130, True)
    assert len(observe.services(engine, RUN)) == 4
    for command in ("stop", "down"):
        for ended in at_each(CHANGES, command, cwd=project):
            if ended.interrupted:
                assert f"interrupted: swarmtrain {command} {RUN} again" in ended.err
                if left(engine) == []:  # it came when all was done but the goodbye
                    break
    assert left(engine) == []


def test_a_lab_is_whole_or_not_there(new_lab: Callable[[str], Lab], tmp_path: Path) -> None:
    lab = new_lab("half")
    for ended in at_each(EFFECTS, "lab", "up", "--nodes", "2", "--name", lab.name, cwd=tmp_path, step=7):
        if ended.interrupted:
            assert swarmtrain("lab", "status", "--name", lab.name, cwd=tmp_path).returncode == 1
    assert [node.state for node in lab.status()] == ["up", "up"]
    for ended in at_each(EFFECTS, "lab", "down", "--name", lab.name, "--keep-images", cwd=tmp_path, step=5):
        assert ended.code in (0, 130)
    assert swarmtrain("lab", "status", "--name", lab.name, cwd=tmp_path).returncode == 1


def test_a_build_ends_with_its_command(project: Path, engine: Engine, image: str) -> None:
    before = {item["Id"] for item in engine.get("/images/json")}
    tag = "registry.lab:5000/interrupted:test"
    ended = at_line("Step", "image", "build", str(ROOT), "--tag", tag, cwd=project)
    assert (ended.code, "Traceback" in ended.err) == (130, False)
    assert tag not in [name for item in engine.get("/images/json") if item["Id"] not in before for name in item["RepoTags"] or ()]
    ended = at_line("pushing", "image", "push", image, cwd=project, after=0.5)
    assert ended.code in (0, 130)
    assert "Traceback" not in ended.err
