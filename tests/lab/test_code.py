"""The code of a run on a real swarm: a few files are Swarm configs, many are a layer of the image, and an edit builds nothing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from swarm_helpers import NODES, RUN, is_run_removed, print_line, run_docker

from swarmtrain.cargo import read_cargo
from swarmtrain.config.loader import parse_config
from swarmtrain.lab import Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.scaling import ScaleRequest, plan_scaled_run
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan, build_plan

FILE_COUNT = 150


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git worktree with a package of many modules, an empty file, and a file that git ignores."""
    for number in range(FILE_COUNT):
        write(tmp_path / f"src/part{number}.py", f"NUMBER = {number}\n")
    write(tmp_path / "src/__init__.py", "")
    write(tmp_path / "src/ignored.py", "ignored\n")
    write(tmp_path / ".gitignore", "ignored.py\n")
    write(tmp_path / "train/main.py", "train()\n")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def plan_code(launcher: SwarmLauncher, image: str, code: list[str]) -> Plan:
    """Return the plan of a run of two nodes whose code is in the working folder."""
    text = f"runner: {{nodes: 2, min_nodes: 1, max_nodes: 3, stop_grace: 10, script: train/main.py, code: {code}}}"
    config = parse_config(text, [f"runner.docker_config.docker_container={image}"])
    return build_plan(config, launcher.read_inventory(config.runner), read_cargo(config, Path.cwd()), run=RUN)


def read_in_containers(lab: Lab, *names: str) -> list[str]:
    """Return the lines of the files `names` of the working folder, as each running node of the run sees them."""
    lines = []
    for node in NODES:
        for container in run_docker(lab, "ps", "-q", "--filter", f"name={RUN}_node", node=node).split():
            lines += run_docker(lab, "exec", "--workdir", "/workspace", container, "cat", *names, node=node).split("\n")[:-1]
    return lines


def list_images(lab: Lab) -> set[str]:
    return {line for line in run_docker(lab, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}").splitlines() if ":code-" in line}


def list_image_layers(lab: Lab, image: str) -> list[str]:
    """Return the digests of the layers of `image`, on the engine of the client."""
    layers: list[str] = json.loads(run_docker(lab, "image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
    return layers


def count_configs(lab: Lab) -> int:
    return sum(name.startswith(f"{RUN}_") for name in run_docker(lab, "config", "ls", "--format", "{{.Name}}").split())


def test_large_code_is_a_layer_and_an_edit_builds_nothing(
    lab: Lab, engine: DockerEngine, launcher: SwarmLauncher, stub_image: str, repository: Path
) -> None:
    images_before = list_images(lab)
    launcher.deploy_run(plan_code(launcher, stub_image, ["."]), print_line)
    built_images = list_images(lab) - images_before
    assert len(built_images) == 1
    assert count_configs(lab) == 3  # the config, the script, the manifest of the layer
    seen = read_in_containers(lab, "train/main.py", "src/part7.py", f"src/part{FILE_COUNT - 1}.py")
    assert seen == ["train()", "NUMBER = 7", f"NUMBER = {FILE_COUNT - 1}"] * 2
    with pytest.raises(subprocess.CalledProcessError):
        read_in_containers(lab, "src/ignored.py")
    assert launcher.plan_changes(plan_code(launcher, stub_image, ["."])) == []

    write(repository / "src/part7.py", "NUMBER = 'edited'\n")
    write(repository / "src/new.py", "NUMBER = 'new'\n")
    plan = plan_code(launcher, stub_image, ["."])
    assert [step.interrupts_run for step in launcher.plan_changes(plan) if "node" in step.name] == [True, True]
    launcher.deploy_run(plan, print_line)
    assert list_images(lab) - images_before == built_images
    assert (
        read_in_containers(lab, "src/part7.py", "src/new.py", "src/part8.py") == ["NUMBER = 'edited'", "NUMBER = 'new'", "NUMBER = 8"] * 2
    )

    config, cargo = launcher.load_deployment(RUN)
    assert config.runner.docker_config.docker_container == stub_image
    assert [(file.name, file.digest) for file in cargo.code] == [(file.name, file.digest) for file in plan.cargo.code]
    scaled_plan = plan_scaled_run(launcher, RUN, ScaleRequest(3))
    assert [step.interrupts_run for step in launcher.plan_changes(scaled_plan)] == [False] * len(launcher.plan_changes(scaled_plan))
    launcher.deploy_run(scaled_plan, print_line)
    assert read_in_containers(lab, "src/part7.py") == ["NUMBER = 'edited'"] * 3

    (repository / "src/part8.py").unlink()
    base_layers = list_image_layers(lab, stub_image)
    run_docker(lab, "tag", *built_images, stub_image)  # on this engine, the tag is another image than in the registry
    try:
        launcher.deploy_run(plan_code(launcher, stub_image, ["."]), print_line)
    finally:
        run_docker(lab, "pull", "--quiet", stub_image)
    assert list_image_layers(lab, stub_image) == base_layers
    (new_image,) = list_images(lab) - images_before - built_images
    assert list_image_layers(lab, new_image)[:-1] == base_layers
    with pytest.raises(subprocess.CalledProcessError):
        read_in_containers(lab, "src/part8.py")
    launcher.tear_down_run(RUN, print_line)
    assert is_run_removed(lab, engine)


def test_a_few_files_are_configs(lab: Lab, engine: DockerEngine, launcher: SwarmLauncher, stub_image: str, repository: Path) -> None:
    images_before = list_images(lab)
    plan = plan_code(launcher, stub_image, ["src/part[1-3].py", "src/__init__.py"])
    launcher.deploy_run(plan, print_line)
    assert count_configs(lab) == 6  # the config, the script, three modules and the empty file
    assert read_in_containers(lab, "src/part3.py", "src/__init__.py") == ["NUMBER = 3", ""] * 2
    assert launcher.load_deployment(RUN)[1] == plan.cargo
    assert list_images(lab) == images_before
    launcher.tear_down_run(RUN, print_line)
    assert is_run_removed(lab, engine)
