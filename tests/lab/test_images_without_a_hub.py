"""Code in image layers of its own, and images on every node without a registry."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import print_line
from swarm_helpers import RUN, run_docker

from swarmtrain import images
from swarmtrain.errors import ImageError
from swarmtrain.images import swarm_nodes
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.planning.plan import Plan
from swarmtrain.render.mounts import WORKSPACE

pytestmark = pytest.mark.test_all_only("builds images")


@pytest.fixture
def code_folder(tmp_path: Path) -> Path:
    """A folder with a Python package."""
    (tmp_path / "lib" / "__pycache__").mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").write_text("name = 'lib'\n")
    (tmp_path / "lib" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "lib" / "run.sh").touch(mode=0o755)
    (tmp_path / "lib" / "key").write_text("secret")
    (tmp_path / "lib" / ".dockerignore").write_text("key\n")
    return tmp_path


def list_layers(engine: DockerEngine, image: str) -> list[str]:
    found: list[str] = engine.client.inspect_image(image)["RootFS"]["Layers"]
    return found


def test_added_code_is_one_layer_and_the_same_one_wherever_it_is_made(
    engine: DockerEngine, lab: Lab, stub_image: str, code_folder: Path
) -> None:
    said: list[str] = []
    tag = f"{REGISTRY_ADDRESS}/stand-in:lib"
    images.add_code_layer(engine.client, [code_folder / "lib"], stub_image, tag, working_folder=code_folder, report_progress=print_line)
    images.push_image(engine.client, tag, report_progress=said.append)
    assert said[-1].startswith("1 layer, ")
    assert list_layers(engine, tag)[:-1] == list_layers(engine, stub_image)

    other = DockerEngine(lab.get_docker_host("node1"), timeout=600)
    os.utime(code_folder / "lib" / "__init__.py", (1, 1))
    images.add_code_layer(
        other.client, [code_folder / "lib"], stub_image, "elsewhere:lib", working_folder=code_folder, report_progress=print_line
    )
    assert list_layers(other, "elsewhere:lib") == list_layers(engine, tag)

    script = (
        "import os, lib; print(lib.name, sorted(os.listdir('lib')), os.access('lib/run.sh', os.X_OK), oct(os.stat('.').st_mode & 0o7777))"
    )
    shown = run_docker(lab, "run", "--rm", "--workdir", WORKSPACE, "--entrypoint", "python3", tag, "-Bc", script)
    assert shown == "lib ['__init__.py', 'run.sh'] True 0o1777\n", "ranks write there, whoever they are"
    other.client.remove_image("elsewhere:lib")


@pytest.mark.parametrize(("name", "why"), [("nowhere", "does not exist"), ("file", "is not a folder"), ("empty", "is empty")])
def test_what_cannot_be_added_is_named(engine: DockerEngine, stub_image: str, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match=why):
        images.add_code_layer(engine.client, [tmp_path / name], stub_image, "other:1", working_folder=tmp_path, report_progress=print_line)


def test_a_run_on_an_image_that_no_registry_has(
    lab: Lab, engine: DockerEngine, launcher: SwarmLauncher, plan_run: Callable[..., Plan], stub_image: str
) -> None:
    engine.client.tag(stub_image, "no-registry/stand-in", "1")
    targets = {"node1": lab.get_docker_host("node1"), "nowhere": "unix:///nowhere.sock"}
    with pytest.raises(
        ImageError, match=r"one engine does not have it:\n  nowhere \(unix:///nowhere.sock\): no engine is reachable"
    ) as caught:
        images.distribute_image(
            engine.client, "no-registry/stand-in:1", targets, lambda address: DockerEngine(address).client, report_progress=print_line
        )
    tag = str(caught.value.place).removeprefix("image ")
    del targets["nowhere"]
    said: list[str] = []
    assert (
        images.distribute_image(
            engine.client, "no-registry/stand-in:1", targets, lambda address: DockerEngine(address).client, report_progress=said.append
        )
        == tag
    )
    assert said[-1] == "node1: already has the image"

    content = engine.client.inspect_image(tag)["Id"]
    assert images.pin_image(engine, tag).reference == images.pin_image(engine, content).reference == content
    launcher.deploy_run(plan_run(image=tag), print_line)
    assert {task.state for task in launcher.list_tasks(RUN)} == {"running"}
    assert run_docker(lab, "ps", "--format", "{{.Image}}", node="node1").split()[0] in content
    launcher.tear_down_run(RUN, print_line)


def test_a_tag_of_spread_that_was_moved_is_refused(engine: DockerEngine, stub_image: str, base_image: str) -> None:
    engine.client.tag(base_image, "moved", "spread-0123456789ab")
    with pytest.raises(ImageError, match="now refers to another image"):
        images.pin_image(engine, "moved:spread-0123456789ab")
    with pytest.raises(ImageError, match="this engine does not have it"):
        images.pin_image(engine, "moved:spread-ba9876543210")
    engine.client.remove_image("moved:spread-0123456789ab")


def test_other_nodes_are_reached_by_ssh_at_their_addresses(engine: DockerEngine) -> None:
    addresses = swarm_nodes.list_other_engines(engine)
    assert sorted(addresses) == ["node1", "node2"]
    assert all(address == f"ssh://{swarm_nodes.get_node_address(engine.get(f'/nodes/{name}'))}" for name, address in addresses.items())
