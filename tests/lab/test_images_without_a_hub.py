"""Code in image layers of its own, a registry in the swarm, and images on every node without a registry."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import print_line
from swarm_helpers import RUN, run_docker

from swarmtrain import images
from swarmtrain.errors import ImageError
from swarmtrain.images import swarm_nodes, swarm_registry
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.plan import Plan
from swarmtrain.render.mounts import WORKSPACE

pytestmark = pytest.mark.test_all_only("builds images and starts registries")

REGISTRY_CONFIG = """
version: "0.1"
storage: {filesystem: {rootdirectory: /var/lib/registry}}
http: {addr: ":5000"}
"""


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


@pytest.fixture(scope="module")
def registry_image(lab: Lab, engine: DockerEngine, base_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of a registry, on the manager only: Docker Hub is not reachable."""
    folder = tmp_path_factory.mktemp("registry")
    shutil.copy(shutil.which("docker-registry") or "/usr/bin/docker-registry", folder / "registry")
    (folder / "config.yml").write_text(REGISTRY_CONFIG)
    (folder / "Dockerfile").write_text(f'FROM {base_image}\nCOPY * /srv/\nENTRYPOINT ["/srv/registry", "serve", "/srv/config.yml"]\n')
    for _ in engine.client.build(path=str(folder), tag="registry-by-hand:1", rm=True, decode=True):
        pass
    return "registry-by-hand:1"


@pytest.fixture
def no_registry(engine: DockerEngine) -> Iterator[None]:
    """Remove the registry, if a test leaves one."""
    yield
    with contextlib.suppress(ImageError):  # there is none
        swarm_registry.remove_registry(engine, remove_images=True, report_progress=print_line)


@pytest.mark.usefixtures("no_registry")
def test_a_registry_in_the_swarm_keeps_its_images(engine: DockerEngine, registry_image: str) -> None:
    standing = swarm_registry.start_registry(engine, port=5055, image=registry_image, report_progress=print_line)
    address = swarm_nodes.get_node_address(engine.get(f"/nodes/{swarm_nodes.get_engine_node_id(engine)}"))
    assert (standing.address, standing.host, standing.state) == (f"{address}:5055", "node0", "running")
    # The lab's engines trust the lab's own registry, but are not configured for this one.
    assert standing.trust_problem == "it is not listed in the engine's insecure-registries"
    assert standing.daemon_json_line == f'"insecure-registries": ["{address}:5055", "{REGISTRY_ADDRESS}"]'
    assert swarm_registry.start_registry(engine, port=5055, image=registry_image, report_progress=print_line) == standing
    with pytest.raises(ImageError, match="the registry is already running"):
        swarm_registry.start_registry(engine, port=5056, image=registry_image, report_progress=print_line)
    with pytest.raises(ImageError, match="unknown node; available nodes: node0, node1, node2"):
        swarm_registry.start_registry(engine, node="node9", report_progress=print_line)
    swarm_registry.remove_registry(engine, remove_images=False, report_progress=print_line)
    assert engine.get(f"/volumes/{swarm_registry.SERVICE_NAME}")["Name"] == swarm_registry.SERVICE_NAME
    swarm_registry.start_registry(engine, port=5055, image=registry_image, report_progress=print_line)
    swarm_registry.remove_registry(engine, remove_images=True, report_progress=print_line)
    assert swarm_registry.SERVICE_NAME not in [volume["Name"] for volume in engine.get("/volumes")["Volumes"] or []]
    with pytest.raises(ImageError, match="no registry in this swarm"):
        swarm_registry.get_registry_status(engine)


@pytest.mark.usefixtures("no_registry")
def test_a_registry_that_cannot_start_prints_why_and_is_removed(engine: DockerEngine, lab: Lab, registry_image: str) -> None:
    listen = "import socket, sys; there = socket.create_server(('', 5055)); print(flush=True); sys.stdin.read()"
    argv = [*lab.build_enter_command("node0", start_folder=Path.cwd()), "python3", "-c", listen]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "\n"
        with pytest.raises(ImageError, match="another process uses port 5055 of node0") as caught:
            swarm_registry.start_registry(engine, port=5055, image=registry_image, report_progress=print_line)
        listener.communicate()
    assert caught.value.hint == "swarmtrain image registry up --port 5056"
    with pytest.raises(ImageError, match=r"does not start on node1: No such image") as caught:
        swarm_registry.start_registry(engine, node="node1", image=registry_image, report_progress=print_line)
    assert "--image" in str(caught.value.hint)
    with pytest.raises(ImageError, match="no registry in this swarm"):
        swarm_registry.remove_registry(engine, remove_images=False, report_progress=print_line)


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
