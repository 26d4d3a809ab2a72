"""Images built, pushed, pinned and run by the lab's engines, none of which can reach any other network."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, print_line

from swarmtrain import images
from swarmtrain.errors import ImageError
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.lab.base_image import create_base_image
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan


def run_in_container(lab: Lab, node: str, image: str, script: str) -> str:
    argv = ["docker", "--host", lab.get_docker_host(node), "run", "--rm", "--volume", "/mnt/shared:/mnt/shared"]
    done = subprocess.run([*argv, "--entrypoint", "sh", image, "-c", script], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.test_all_only("pulls the image on every node; the contract deploys it there")
def test_another_node_pulls_the_image_and_can_train_with_it(lab: Lab, image: str) -> None:
    assert (
        run_in_container(lab, "node1", image, "id -un; id -u; pwd; touch new; ls")
        == "trainer\n1000\n/workspace\ndatautils.py\nnew\nruns\ntraining_code.py\n"
    )
    torch = "import torch, yaml, pydantic, wandb, swarmtrain; print(torch.ones(2).sum().item())"
    assert run_in_container(lab, "node1", image, f"python3 -c '{torch}'") == "2.0\n"
    assert (
        run_in_container(lab, "node1", image, "python3 -c 'import lzma, sqlite3, ssl, ctypes, this' | head -1")
        == "The Zen of Python, by Tim Peters\n"
    )


@pytest.mark.test_all_only("pulls the image on every node; the contract deploys it there")
def test_the_image_writes_to_the_shared_disk(lab: Lab, image: str) -> None:
    run_in_container(lab, "node1", image, "echo hello >/mnt/shared/from-a-container")
    assert (lab.shared_disk / "from-a-container").read_text() == "hello\n"
    (lab.shared_disk / "from-a-container").unlink()


def test_imports_are_compiled_in_the_image(lab: Lab, image: str) -> None:
    script = "import torch, pydantic, swarmtrain.config as config; print(torch.__cached__, pydantic.__cached__, config.__cached__)"
    files = run_in_container(lab, "node1", image, f"python3 -c '{script}'").split()
    assert len(files) == 3
    for cached in files:
        run_in_container(lab, "node1", image, f"test -s {cached}")


@pytest.mark.test_all_only("builds an image again")
def test_a_second_build_downloads_nothing_and_keeps_the_layers_of_wheels(engine: DockerEngine, image: str) -> None:
    before = engine.client.inspect_image(image)["Id"]
    stamp = (ROOT / "build" / "wheels" / ".complete").stat().st_mtime_ns
    said: list[str] = []
    images.build_image(engine.client, ROOT, image, base_image=create_base_image, report_progress=said.append)
    assert (ROOT / "build" / "wheels" / ".complete").stat().st_mtime_ns == stamp
    assert not [line for line in said if line.startswith("downloading")]
    layers = engine.client.inspect_image(before)["RootFS"]["Layers"]
    # Base image, user, pins, packages. The layers after these hold swarmtrain itself, which may change while the tests run.
    assert engine.client.inspect_image(image)["RootFS"]["Layers"][:4] == layers[:4]
    assert len(layers) > 4
    assert engine.client.containers(all=True) == []


@pytest.mark.test_all_only("pulls the image on every node; the contract deploys it there")
def test_a_pinned_image_is_what_the_nodes_pull(lab: Lab, engine: DockerEngine, image: str) -> None:
    pinned = images.pin_image(engine, image)
    assert pinned.reference.startswith(f"{image}@sha256:")
    assert pinned.platforms == ((engine.client.version()["Arch"], "linux"),)
    node = DockerEngine(lab.get_docker_host("node2"), timeout=600).client
    node.pull(pinned.reference)
    assert node.inspect_image(pinned.reference)["Id"] == engine.client.inspect_image(image)["Id"]
    assert images.pin_image(engine, pinned.reference).reference == pinned.reference


@pytest.mark.parametrize(
    ("missing", "next_step"),
    [(f"{REGISTRY_ADDRESS}/nothing:1.0", "image build . --tag"), ("registry.nowhere:5000/swarmtrain:1.0", "insecure-registries")],
)
def test_pinning_what_no_registry_has_names_the_next_step(engine: DockerEngine, missing: str, next_step: str) -> None:
    with pytest.raises(ImageError) as caught:
        images.pin_image(engine, missing)
    assert caught.value.place == f"image {missing}"
    assert next_step in str(caught.value.hint)


def test_pushing_what_is_not_there_or_nowhere_fails(engine: DockerEngine, image: str) -> None:
    with pytest.raises(ImageError, match=r"nothing:1\.0"):
        images.push_image(engine.client, f"{REGISTRY_ADDRESS}/nothing:1.0", report_progress=print_line)
    engine.client.tag(image, "registry.nowhere:5000/swarmtrain", "1.0")
    with pytest.raises(ImageError, match=r"registry\.nowhere"):
        images.push_image(engine.client, "registry.nowhere:5000/swarmtrain:1.0", report_progress=print_line)
    engine.client.remove_image("registry.nowhere:5000/swarmtrain:1.0")


def test_a_base_image_that_cannot_be_pulled_is_not_replaced(engine: DockerEngine) -> None:
    with pytest.raises(ImageError, match="cannot pull it"):
        images.build_image(
            engine.client, ROOT, f"{REGISTRY_ADDRESS}/other:1.0", base_image="example.invalid/python:9", report_progress=print_line
        )


@pytest.mark.test_all_only("builds an image again")
def test_a_step_that_fails_is_reported_with_its_output(engine: DockerEngine, image: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "build" / "wheels", tmp_path / "build" / "wheels")
    (tmp_path / "train.py").touch()
    base = create_base_image(engine.client, print_line)
    (tmp_path / "Dockerfile").write_text(f"FROM {base}\nRUN echo the reason; exit 3\n")
    said: list[str] = []
    with pytest.raises(ImageError, match="returned a non-zero code: 3"):
        images.build_image(
            engine.client,
            tmp_path,
            f"{REGISTRY_ADDRESS}/other:1.0",
            base_image=base,
            report_progress=said.append,
        )
    assert "the reason" in said


@pytest.mark.test_all_only("builds an image again")
def test_a_dockerfile_that_copies_the_wheels_has_them_in_its_context(engine: DockerEngine, image: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "build" / "wheels", tmp_path / "build" / "wheels")
    (tmp_path / "train.py").touch()
    (tmp_path / "Dockerfile").write_text(
        "ARG BASE_IMAGE\nFROM ${BASE_IMAGE}\nARG PIP_ARGS\nCOPY build/wheels /wheels\n"
        "RUN python3 -m venv /opt/venv && /opt/venv/bin/pip install ${PIP_ARGS} pydantic\n"
    )
    said: list[str] = []
    other = f"{REGISTRY_ADDRESS}/other:1.0"
    images.build_image(engine.client, tmp_path, other, base_image=create_base_image, report_progress=said.append)
    assert any("Successfully installed" in line and "pydantic-" in line for line in said)


@pytest.mark.test_all_only("builds an image again")
def test_a_deploy_reports_what_changed_since_the_image_was_built(
    launcher: SwarmLauncher, plan_run: Callable[..., Plan], image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    plan = plan_run(image=image)
    assert launcher.check_plan(plan) == []
    monkeypatch.chdir(tmp_path)
    assert launcher.check_plan(plan) == []
    (tmp_path / "Dockerfile").touch()
    (tmp_path / "training_code.py").touch()  # is shipped with the run
    (found,) = launcher.check_plan(plan)
    assert (found.place, found.message, found.fatal) == (f"image {image}", "changed since it was built: Dockerfile", False)
    assert found.hint == f"swarmtrain image build . --tag {image} --push"
