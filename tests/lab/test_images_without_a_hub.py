"""Code in layers of its own, a registry in the swarm, and images on every node without one."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import say
from stand_in import RUN, docker

from swarmtrain import images
from swarmtrain.errors import ImageError
from swarmtrain.images import registry, swarm
from swarmtrain.lab import REGISTRY, Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher
from swarmtrain.plan import Plan
from swarmtrain.render.mounts import WORKSPACE

pytestmark = pytest.mark.test_all_only("builds images and starts registries")

SETTINGS = """
version: "0.1"
storage: {filesystem: {rootdirectory: /var/lib/registry}}
http: {addr: ":5000"}
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with a package in it."""
    (tmp_path / "lib" / "__pycache__").mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").write_text("name = 'lib'\n")
    (tmp_path / "lib" / "__pycache__" / "x.pyc").touch()
    (tmp_path / "lib" / "run.sh").touch(mode=0o755)
    (tmp_path / "lib" / "key").write_text("secret")
    (tmp_path / "lib" / ".dockerignore").write_text("key\n")
    return tmp_path


def layers(engine: Engine, image: str) -> list[str]:
    found: list[str] = engine.client.inspect_image(image)["RootFS"]["Layers"]
    return found


def test_added_code_is_one_layer_and_the_same_one_wherever_it_is_made(engine: Engine, lab: Lab, stand_in: str, code: Path) -> None:
    said: list[str] = []
    tag = f"{REGISTRY}/stand-in:lib"
    images.add(engine.client, [code / "lib"], stand_in, tag, here=code, say=say)
    images.push(engine.client, tag, say=said.append)
    assert said[-1].startswith("1 layer, ")
    assert layers(engine, tag)[:-1] == layers(engine, stand_in)

    other = Engine(lab.docker_host("node1"), timeout=600)
    os.utime(code / "lib" / "__init__.py", (1, 1))
    images.add(other.client, [code / "lib"], stand_in, "elsewhere:lib", here=code, say=say)
    assert layers(other, "elsewhere:lib") == layers(engine, tag)

    script = (
        "import os, lib; print(lib.name, sorted(os.listdir('lib')), os.access('lib/run.sh', os.X_OK), oct(os.stat('.').st_mode & 0o7777))"
    )
    shown = docker(lab, "run", "--rm", "--workdir", WORKSPACE, "--entrypoint", "python3", tag, "-Bc", script)
    assert shown == "lib ['__init__.py', 'run.sh'] True 0o1777\n", "ranks write there, whoever they are"
    other.client.remove_image("elsewhere:lib")


@pytest.mark.parametrize(("name", "why"), [("nowhere", "no such folder"), ("file", "is no folder"), ("empty", "nothing in it")])
def test_what_cannot_be_added_is_named(engine: Engine, stand_in: str, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match=why):
        images.add(engine.client, [tmp_path / name], stand_in, "other:1", here=tmp_path, say=say)


@pytest.fixture(scope="module")
def registry_image(lab: Lab, engine: Engine, base: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image of a registry, on the manager alone: no hub is in reach."""
    folder = tmp_path_factory.mktemp("registry")
    shutil.copy(shutil.which("docker-registry") or "/usr/bin/docker-registry", folder / "registry")
    (folder / "config.yml").write_text(SETTINGS)
    (folder / "Dockerfile").write_text(f'FROM {base}\nCOPY * /srv/\nENTRYPOINT ["/srv/registry", "serve", "/srv/config.yml"]\n')
    for _ in engine.client.build(path=str(folder), tag="registry-by-hand:1", rm=True, decode=True):
        pass
    return "registry-by-hand:1"


@pytest.fixture
def no_registry(engine: Engine) -> Iterator[None]:
    """Whatever a test leaves of a registry is removed."""
    yield
    with contextlib.suppress(ImageError):  # there is none
        registry.down(engine, volume=True, say=say)


@pytest.mark.usefixtures("no_registry")
def test_a_registry_in_the_swarm_keeps_its_images(engine: Engine, registry_image: str) -> None:
    standing = registry.up(engine, port=5055, image=registry_image, say=say)
    address = swarm.address(engine.get(f"/nodes/{swarm.own_id(engine)}"))
    assert (standing.address, standing.host, standing.state) == (f"{address}:5055", "node0", "running")
    # The lab's engines trust the lab's own registry, and were not told of this one.
    assert standing.trust == "it is not among its insecure-registries"
    assert standing.line == f'"insecure-registries": ["{address}:5055", "{REGISTRY}"]'
    assert registry.up(engine, port=5055, image=registry_image, say=say) == standing
    with pytest.raises(ImageError, match="it is up already"):
        registry.up(engine, port=5056, image=registry_image, say=say)
    with pytest.raises(ImageError, match="no such node; there is: node0, node1, node2"):
        registry.up(engine, node="node9", say=say)
    registry.down(engine, volume=False, say=say)
    assert engine.get(f"/volumes/{registry.NAME}")["Name"] == registry.NAME
    registry.up(engine, port=5055, image=registry_image, say=say)
    registry.down(engine, volume=True, say=say)
    assert registry.NAME not in [volume["Name"] for volume in engine.get("/volumes")["Volumes"] or []]
    with pytest.raises(ImageError, match="no registry in this swarm"):
        registry.status(engine)


@pytest.mark.usefixtures("no_registry")
def test_a_registry_that_cannot_start_says_why_and_is_gone(engine: Engine, lab: Lab, registry_image: str) -> None:
    listen = "import socket, sys; there = socket.create_server(('', 5055)); print(flush=True); sys.stdin.read()"
    argv = [*lab.enter("node0", folder=Path.cwd()), "python3", "-c", listen]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "\n"
        with pytest.raises(ImageError, match="something else has port 5055 of node0") as caught:
            registry.up(engine, port=5055, image=registry_image, say=say)
        listener.communicate()
    assert caught.value.hint == "swarmtrain image registry up --port 5056"
    with pytest.raises(ImageError, match=r"does not start on node1: No such image") as caught:
        registry.up(engine, node="node1", image=registry_image, say=say)
    assert "--image" in str(caught.value.hint)
    with pytest.raises(ImageError, match="no registry in this swarm"):
        registry.down(engine, volume=False, say=say)


def test_a_run_on_an_image_that_no_registry_has(
    lab: Lab, engine: Engine, launcher: SwarmLauncher, planned: Callable[..., Plan], stand_in: str
) -> None:
    engine.client.tag(stand_in, "no-registry/stand-in", "1")
    targets = {"node1": lab.docker_host("node1"), "nowhere": "unix:///nowhere.sock"}
    with pytest.raises(ImageError, match=r"one engine does not have it:\n  nowhere \(unix:///nowhere.sock\): no engine answers") as caught:
        images.spread(engine.client, "no-registry/stand-in:1", targets, lambda address: Engine(address).client, say=say)
    tag = str(caught.value.place).removeprefix("image ")
    del targets["nowhere"]
    said: list[str] = []
    assert images.spread(engine.client, "no-registry/stand-in:1", targets, lambda address: Engine(address).client, say=said.append) == tag
    assert said[-1] == "node1: has it"

    content = engine.client.inspect_image(tag)["Id"]
    assert images.pin(engine, tag).reference == images.pin(engine, content).reference == content
    launcher.up(planned(image=tag), say)
    assert {task.state for task in launcher.tasks(RUN)} == {"running"}
    assert docker(lab, "ps", "--format", "{{.Image}}", node="node1").split()[0] in content
    launcher.down(RUN, say)


def test_a_tag_of_spread_that_was_moved_is_refused(engine: Engine, stand_in: str, base: str) -> None:
    engine.client.tag(base, "moved", "spread-0123456789ab")
    with pytest.raises(ImageError, match="given to another image"):
        images.pin(engine, "moved:spread-0123456789ab")
    with pytest.raises(ImageError, match="this engine does not have it"):
        images.pin(engine, "moved:spread-ba9876543210")
    engine.client.remove_image("moved:spread-0123456789ab")


def test_other_nodes_are_reached_by_ssh_at_their_addresses(engine: Engine) -> None:
    addresses = swarm.others(engine)
    assert sorted(addresses) == ["node1", "node2"]
    assert all(address == f"ssh://{swarm.address(engine.get(f'/nodes/{name}'))}" for name, address in addresses.items())
