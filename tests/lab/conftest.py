"""A real lab for the tests of this folder, started once, and the image in its registry, built and pushed once.

If this machine cannot host a lab, the tests skip and print why; with CI=true they fail instead.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import image_cache
import pytest
from error_cases import ErrorCase
from swarm_helpers import RUN, STUB_ENTRYPOINT, build_test_image, print_line

from swarmtrain import images
from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import LabError
from swarmtrain.lab import REGISTRY_ADDRESS, Lab
from swarmtrain.lab.base_image import create_base_image
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm import SwarmLauncher, cluster_state, teardown
from swarmtrain.planning.plan import Plan, build_plan

LAB_PARTS = ("swarm", "ssh")
IMAGE = f"{REGISTRY_ADDRESS}/swarmtrain:test"
ROOT = Path(__file__).parents[2]
# The directory of the engine to test with. Without the variable, the system's engine is used.
ENGINE_FOLDER = Path(os.environ["SWARMTRAIN_TEST_ENGINE"]) if "SWARMTRAIN_TEST_ENGINE" in os.environ else None


@pytest.fixture(scope="session")
def create_lab(request: pytest.FixtureRequest) -> Callable[..., Lab]:
    """Return a function that makes labs for this test run only, with the given parts. Leftovers of a lab are removed at the end.

    The process id in the name separates test runs on the same machine.
    """

    def make(name: str, parts: Sequence[str] = ("swarm",)) -> Lab:
        lab = Lab(f"{name}-{os.getpid()}")
        try:
            lab.check_prerequisites(ENGINE_FOLDER, parts)
        except LabError as error:
            if os.environ.get("CI") == "true":
                raise
            pytest.skip(f"this machine can host no lab: {error}")
        request.addfinalizer(lambda: lab.tear_down(report_progress=print_line))
        return lab

    return make


@pytest.fixture(scope="session")
def lab(create_lab: Callable[[str], Lab]) -> Lab:
    """A lab of three nodes that all tests share. A test must leave it as it was."""
    lab = create_lab("test", LAB_PARTS)
    lab.bring_up(3, components=LAB_PARTS, engine_folder=ENGINE_FOLDER, report_progress=print_line)
    if ENGINE_FOLDER is None:
        image_cache.restore_registry(image_cache.find_shared_cache())
        image_cache.restore_images(lab, ["node0", "node1", "node2"], image_cache.find_shared_cache())
    return lab


@pytest.fixture(scope="session")
def engine(lab: Lab) -> DockerEngine:
    """The engine of the lab's manager."""
    return DockerEngine(lab.get_docker_host("node0"), timeout=600)


@pytest.fixture(scope="session")
def image(lab: Lab, engine: DockerEngine) -> str:
    """The image of this repository, in the lab's registry; every node can pull it. Another suite may have built it already."""
    if not engine.client.images(IMAGE):
        images.build_image(engine.client, ROOT, IMAGE, base_image=create_base_image, report_progress=print_line)
        images.push_image(engine.client, IMAGE, report_progress=print_line)
        image_cache.save_images(lab, "node0", image_cache.find_shared_cache() if ENGINE_FOLDER is None else None)
    return IMAGE


@pytest.fixture(scope="session")
def base_image(engine: DockerEngine) -> str:
    """An image with Python but without swarmtrain, in the lab's registry."""
    base = create_base_image(engine.client, print_line)
    return build_test_image(engine, f"{REGISTRY_ADDRESS}/base:test", {"Dockerfile": f"FROM {base}\n"})


@pytest.fixture(scope="session")
def stub_image(engine: DockerEngine, base_image: str) -> str:
    """An image with a stub entrypoint that only prints and waits, in the lab's registry."""
    dockerfile = f"FROM {base_image}\nCOPY swarmtrain /stand-in/swarmtrain\nENV PYTHONPATH=/stand-in\n"
    files = {"Dockerfile": dockerfile, "swarmtrain/__init__.py": "", "swarmtrain/entrypoint.py": STUB_ENTRYPOINT}
    return build_test_image(engine, f"{REGISTRY_ADDRESS}/stand-in:test", files)


@pytest.fixture
def launcher(lab: Lab) -> Iterator[SwarmLauncher]:
    """The launcher on the lab's manager. If a test leaves its run up, the run is taken down."""
    launcher = SwarmLauncher(lab.get_docker_host("node0"))
    yield launcher
    if not cluster_state.read_stack_state(launcher._engine, RUN).is_empty:
        launcher.tear_down_run(RUN, print_line)


@pytest.fixture
def plan_run(launcher: SwarmLauncher, stub_image: str) -> Callable[..., Plan]:
    """Return a function that plans the run on the stub image."""

    def make(
        nodes: int = 2, script: bytes = b"train()\n", image: str = stub_image, mounts: tuple[tuple[str, str], ...] = (), **runner: Any
    ) -> Plan:
        docker = {"docker_container": image, "docker_mounts": mounts}
        settings = {"nodes": nodes, "min_nodes": 1, "max_nodes": 3, "stop_grace": 10, "docker_config": docker, **runner}
        config = Config.model_validate({"runner": settings})
        cargo = Cargo((RunFile.from_content("training_code.py", script),), (RunFile.from_content("TOKEN", b"hidden"),))
        return build_plan(config, launcher.read_inventory(config.runner), cargo, run=RUN)

    return make


@pytest.fixture(scope="session")
def release_image(engine: DockerEngine, stub_image: str) -> str:
    """The stub image under the name that the pages show."""
    return build_test_image(engine, f"{REGISTRY_ADDRESS}/swarmtrain:0.1", {"Dockerfile": f"FROM {stub_image}\n"})


@pytest.fixture
def connect_to_lab(
    error_case: ErrorCase, lab: Lab, engine: DockerEngine, release_image: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """For error cases: commands connect to the lab's manager. If a case leaves the run `config` up, it is taken down."""
    address = lab.get_docker_host("node0")
    monkeypatch.setenv("DOCKER_HOST", address)
    error_case.env["DOCKER_HOST"] = address
    error_case.add_replacement(
        f"{lab.get_docker_host('node0').rpartition('/node0/')[0]}/node\\d/docker.sock", "unix:///var/run/docker.sock"
    )
    yield
    teardown.tear_down_stack(engine, "config", print_line)
