"""Images that cannot be pulled, or in which a run cannot start."""

from __future__ import annotations

import pytest
from error_cases import ErrorCase
from swarm_helpers import build_test_image

from swarmtrain.launchers.common.docker_engine import DockerEngine

CHAPTER = "The image"
pytestmark = pytest.mark.usefixtures("connect_to_lab")


def test_an_image_that_no_registry_has(error_case: ErrorCase) -> None:
    """Image not found in the registry

    The image was not pushed, or has another tag in the registry.
    """
    error_case.write_config("runner: {nodes: 1, docker_config: {docker_container: 'registry.lab:5000/swarmtrain:0.7'}}")
    error_case("swarmtrain deploy config.yml", start_pattern="^error:")


def test_a_registry_that_does_not_answer(error_case: ErrorCase) -> None:
    """Registry cannot be reached

    The engine connects to the registry, not the machine that deploys.
    """
    error_case.add_replacement("dial tcp.*", "dial tcp: …")
    error_case.write_config("runner: {nodes: 1, docker_config: {docker_container: 'registry.invalid:5000/swarmtrain:0.1'}}")
    error_case("swarmtrain deploy config.yml", start_pattern="^error:")


def test_a_base_image_that_cannot_be_pulled(error_case: ErrorCase) -> None:
    """Base image cannot be pulled

    The engine does not reach Docker Hub. `swarmtrain queue up` fails in the same way.
    """
    error_case.add_replacement(r"dial tcp: .*", "dial tcp: …")
    error_case("swarmtrain image build . --tag registry.lab:5000/swarmtrain:0.2 --base python:3.11-bookworm", start_pattern="^error:")


def test_an_image_without_swarmtrain(error_case: ErrorCase, base_image: str) -> None:
    """Image does not contain swarmtrain

    The image has Python, but not swarmtrain. The deploy is rolled back.
    """
    error_case.write_config(f"runner: {{nodes: 1, docker_config: {{docker_container: '{base_image}'}}}}")
    error_case("swarmtrain deploy config.yml", start_pattern="^error:", allowed_changes="home/state", timeout=120)


def test_an_image_without_python(error_case: ErrorCase, engine: DockerEngine) -> None:
    """Image does not contain Python

    swarmtrain's own code cannot run in such an image, so the engine reports the error.
    """
    # Whichever of the two services fails first.
    error_case.add_replacement(r"; rendezvous on node0: task: non-zero exit \(127\)\n.*", "")
    error_case.add_replacement("rendezvous on node0: task", "node0 on node0: task")
    error_case.add_replacement(r"tini \(\d+\)", "tini (7)")
    image = build_test_image(engine, "registry.lab:5000/empty:1", {"Dockerfile": "FROM scratch\nCOPY file /file\n", "file": "nothing"})
    error_case.write_config(f"runner: {{nodes: 1, docker_config: {{docker_container: '{image}'}}}}")
    error_case("swarmtrain deploy config.yml", start_pattern="^error:", allowed_changes="home/state", timeout=120)
