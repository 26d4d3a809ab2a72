"""Ctrl-C, SIGTERM and a closed terminal on a real swarm: before every change that a command makes, and while it waits."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupt import CHANGES, EFFECTS, ROOT, SIGNALS, interrupt_at_each_event, interrupt_at_line
from swarm_helpers import RUN, print_line

from swarmtrain.lab import Lab
from swarmtrain.lab.base_image import create_base_image
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import cluster_state, teardown

CONFIG = """
runner:
  nodes: 2
  min_nodes: 1
  max_nodes: 3
  stop_grace: 10
  docker_config: {docker_container: "%s"}
"""


@pytest.fixture
def project(lab: Lab, engine: DockerEngine, stub_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DOCKER_HOST", lab.get_docker_host("node0"))
    (tmp_path / "training_code.py").write_text("train()\n")
    (tmp_path / f"{RUN}.yml").write_text(CONFIG % stub_image)
    yield tmp_path
    teardown.tear_down_stack(engine, RUN, print_line)


def run_swarmtrain(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "swarmtrain", *argv], cwd=cwd, capture_output=True, text=True, check=False, env=env)


def list_leftovers(engine: DockerEngine) -> list[str]:
    """Return everything that the swarm has of the run, with any label, except for tasks that have ended."""
    kinds = {"services": "Name", "configs": "Name", "secrets": "Name"}
    names = [item["Spec"]["Name"] for kind in kinds for item in engine.list_objects(f"/{kind}")]
    names += [item["Name"] for item in engine.list_objects("/networks")]
    running = [f"task {task.id}" for task in cluster_state.list_tasks(engine, RUN) if not task.is_final]
    return [name for name in [*names, *running] if RUN in name or name.startswith("task ")]


def is_run_up_to_date(project: Path, engine: DockerEngine) -> bool:
    """Return whether the run matches its config, and its lock is not held."""
    output = run_swarmtrain("plan", f"{RUN}.yml", cwd=project).stderr
    return output.endswith("a deploy would change nothing\n") and f"{RUN}_lock" not in list_leftovers(engine)


def test_a_first_deploy_leaves_nothing_or_the_run(project: Path, engine: DockerEngine) -> None:
    gone = 0
    for ended in interrupt_at_each_event(CHANGES, "deploy", f"{RUN}.yml", "--detach", cwd=project):
        if list_leftovers(engine):
            assert is_run_up_to_date(project, engine), ended.err
        else:
            gone += 1
            assert "interrupted: no part of the run remains" in ended.err
    assert gone >= 5
    assert is_run_up_to_date(project, engine)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_containers_start_and_while_they_are_followed(project: Path, engine: DockerEngine, number: int) -> None:
    ended = interrupt_at_line("preparing", "deploy", f"{RUN}.yml", cwd=project, signum=number)
    assert (ended.code, list_leftovers(engine)) == (130, []), ended.err
    ended = interrupt_at_line("Ctrl-C detaches", "deploy", f"{RUN}.yml", cwd=project, signum=number, delay=0.5)
    assert (ended.code, len(cluster_state.list_services(engine, RUN))) == (130, 3)
    assert f"detached; {RUN} continues" in ended.err
    assert "Traceback" not in ended.err


def test_the_same_command_completes_an_interrupted_change(project: Path, engine: DockerEngine) -> None:
    assert run_swarmtrain("deploy", f"{RUN}.yml", "--detach", cwd=project).returncode == 0
    for ended in interrupt_at_each_event(CHANGES, "deploy", f"{RUN}.yml", "--detach", "--yes", "-o", "trainer.seed=7", cwd=project):
        if ended.is_interrupted:
            assert "interrupted: run the same command again to complete the change" in ended.err
            assert len(cluster_state.list_services(engine, RUN)) == 3
    assert run_swarmtrain("plan", f"{RUN}.yml", "-o", "trainer.seed=7", cwd=project).stderr.endswith("a deploy would change nothing\n")


def test_scale_stop_and_down_can_be_repeated(project: Path, engine: DockerEngine) -> None:
    assert run_swarmtrain("deploy", f"{RUN}.yml", "--detach", cwd=project).returncode == 0
    # The stub never forms a world, so the command is interrupted here.
    ended = interrupt_at_line("waiting for a world", "scale", "--nodes", "3", cwd=project)
    assert (ended.code, f"interrupted: {RUN} continues" in ended.err) == (130, True), ended.err
    assert len(cluster_state.list_services(engine, RUN)) == 4
    for command in ("stop", "down"):
        for ended in interrupt_at_each_event(CHANGES, command, cwd=project):
            if ended.is_interrupted:
                assert f"interrupted: swarmtrain {command} {RUN} again" in ended.err
                if list_leftovers(engine) == []:  # the signal came when only the final message was missing
                    break
    assert list_leftovers(engine) == []


def test_a_lab_is_complete_or_absent(create_lab: Callable[[str], Lab], tmp_path: Path) -> None:
    lab = create_lab("half")
    for ended in interrupt_at_each_event(EFFECTS, "lab", "up", "--nodes", "2", "--name", lab.name, cwd=tmp_path, step=7):
        if ended.is_interrupted:
            assert run_swarmtrain("lab", "status", "--name", lab.name, cwd=tmp_path).returncode == 1
    assert [node.state for node in lab.get_status()] == ["up", "up"]
    for ended in interrupt_at_each_event(EFFECTS, "lab", "down", "--name", lab.name, "--keep-images", cwd=tmp_path, step=5):
        assert ended.code in (0, 130)
    assert run_swarmtrain("lab", "status", "--name", lab.name, cwd=tmp_path).returncode == 1


def test_a_build_ends_with_its_command(project: Path, engine: DockerEngine, image: str) -> None:
    before = {item["Id"] for item in engine.get("/images/json")}
    tag = "registry.lab:5000/interrupted:test"
    base = create_base_image(engine.client, print_line)
    (project / "requirements.txt").write_text(f"# {project}\n")  # its steps are not in the engine's cache
    ended = interrupt_at_line("Step", "image", "build", ".", "--tag", tag, "--base", base, cwd=project)
    assert (ended.code, "Traceback" in ended.err) == (130, False)
    assert tag not in [name for item in engine.get("/images/json") if item["Id"] not in before for name in item["RepoTags"] or ()]
    ended = interrupt_at_line("pushing", "image", "push", image, cwd=project, delay=0.5)
    assert ended.code in (0, 130)
    assert "Traceback" not in ended.err
