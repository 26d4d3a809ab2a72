"""A real lab for the tests of this folder, brought up once, and the image in its registry, built and pushed once.

Where this machine can host no lab, the tests skip and say why; with CI=true they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import built
import pytest
from answers import Answer
from stand_in import RUN, STAND_IN, build, say

from swarmtrain import images
from swarmtrain.config import Config
from swarmtrain.errors import LabError
from swarmtrain.images.base import ensure_base
from swarmtrain.lab import REGISTRY, Lab
from swarmtrain.launchers.engine import Engine
from swarmtrain.launchers.swarm import SwarmLauncher, observe, removal
from swarmtrain.plan import Cargo, CodeFile, Plan, make_plan

PARTS = ("swarm", "ssh")
IMAGE = f"{REGISTRY}/swarmtrain:test"
ROOT = Path(__file__).parents[2]
# The directory of the engine to test with; without it the system's own.
ENGINE = Path(os.environ["SWARMTRAIN_TEST_ENGINE"]) if "SWARMTRAIN_TEST_ENGINE" in os.environ else None


@pytest.fixture(scope="session")
def new_lab(request: pytest.FixtureRequest) -> Callable[..., Lab]:
    """Return a function that makes labs of this test run alone, for machines of some parts; what is left of one is removed at the end.

    The process id in the name keeps runs side by side apart.
    """

    def make(name: str, parts: Sequence[str] = ("swarm",)) -> Lab:
        lab = Lab(f"{name}-{os.getpid()}")
        try:
            lab.check(ENGINE, parts)
        except LabError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"this machine can host no lab: {error}")
        request.addfinalizer(lambda: lab.down(say=say))
        return lab

    return make


@pytest.fixture(scope="session")
def lab(new_lab: Callable[[str], Lab]) -> Lab:
    """A lab of three nodes that all tests share: leave it as you found it."""
    lab = new_lab("test", PARTS)
    lab.up(3, parts=PARTS, engine=ENGINE, say=say)
    if ENGINE is None:
        built.give_registry(built.shared())
        built.give(lab, ["node0", "node1", "node2"], built.shared())
    return lab


@pytest.fixture(scope="session")
def engine(lab: Lab) -> Engine:
    """The engine of the lab's manager."""
    return Engine(lab.docker_host("node0"), timeout=600)


@pytest.fixture(scope="session")
def image(lab: Lab, engine: Engine) -> str:
    """The image of this repository, in the lab's registry; every node can pull it. Another suite may have built it."""
    if not engine.client.images(IMAGE):
        images.build(engine.client, ROOT, IMAGE, say=say)
        images.push(engine.client, IMAGE, say=say)
        built.keep(lab, "node0", built.shared() if ENGINE is None else None)
    return IMAGE


@pytest.fixture(scope="session")
def base(engine: Engine) -> str:
    """An image with Python but without swarmtrain, in the lab's registry."""
    made = ensure_base(engine.client, None, say=say)
    return build(engine, f"{REGISTRY}/base:test", {"Dockerfile": f"FROM {made}\n"})


@pytest.fixture(scope="session")
def stand_in(engine: Engine, base: str) -> str:
    """An image whose entrypoint only prints and waits, in the lab's registry."""
    dockerfile = f"FROM {base}\nCOPY swarmtrain /stand-in/swarmtrain\nENV PYTHONPATH=/stand-in\n"
    files = {"Dockerfile": dockerfile, "swarmtrain/__init__.py": "", "swarmtrain/entrypoint.py": STAND_IN}
    return build(engine, f"{REGISTRY}/stand-in:test", files)


@pytest.fixture
def launcher(lab: Lab) -> Iterator[SwarmLauncher]:
    """The launcher on the lab's manager; what a test leaves of its run is taken down."""
    made = SwarmLauncher(lab.docker_host("node0"))
    yield made
    if not observe.observe(made._engine, RUN).empty:
        made.down(RUN, say)


@pytest.fixture
def planned(launcher: SwarmLauncher, stand_in: str) -> Callable[..., Plan]:
    """Return a function that plans the run on the stand-in image."""

    def make(
        nodes: int = 2, script: bytes = b"train()\n", image: str = stand_in, mounts: tuple[tuple[str, str], ...] = (), **runner: Any
    ) -> Plan:
        docker = {"docker_container": image, "docker_mounts": mounts}
        settings = {"nodes": nodes, "min_nodes": 1, "max_nodes": 3, "stop_grace": 10, "docker_config": docker, **runner}
        config = Config.model_validate({"runner": settings})
        cargo = Cargo((CodeFile.of("training_code.py", script),), (CodeFile.of("TOKEN", b"hidden"),))
        return make_plan(config, launcher.inventory(), cargo, run=RUN)

    return make


@pytest.fixture(scope="session")
def release(engine: Engine, stand_in: str) -> str:
    """The same image under the name that the pages show."""
    return build(engine, f"{REGISTRY}/swarmtrain:0.1", {"Dockerfile": f"FROM {stand_in}\n"})


@pytest.fixture
def on_the_lab(answer: Answer, lab: Lab, engine: Engine, release: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For cases of bad input: commands speak to the lab's manager; what they leave of the run `config` is taken down."""
    address = lab.docker_host("node0")
    monkeypatch.setenv("DOCKER_HOST", address)
    answer.env["DOCKER_HOST"] = address
    answer.same(f"{lab.docker_host('node0').rpartition('/node0/')[0]}/node\\d/docker.sock", "unix:///var/run/docker.sock")
    yield
    removal.take_down(engine, "config", say)
