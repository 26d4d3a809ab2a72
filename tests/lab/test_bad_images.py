"""Images that cannot be had, or that a run cannot start in."""

from __future__ import annotations

import pytest
from answers import Answer
from stand_in import build

from swarmtrain.launchers.engine import Engine

CHAPTER = "The image"
pytestmark = pytest.mark.usefixtures("on_the_lab")


def test_an_image_that_no_registry_has(answer: Answer) -> None:
    """An image that no registry has

    It was not pushed, or has another tag there.
    """
    answer.config("runner: {nodes: 1, docker_config: {docker_container: 'registry.lab:5000/swarmtrain:0.7'}}")
    answer("swarmtrain deploy config.yml", since="^error:")


def test_a_registry_that_does_not_answer(answer: Answer) -> None:
    """A registry that does not answer

    The engine asks it, not the machine that deploys.
    """
    answer.same("dial tcp.*", "dial tcp: …")
    answer.config("runner: {nodes: 1, docker_config: {docker_container: 'registry.invalid:5000/swarmtrain:0.1'}}")
    answer("swarmtrain deploy config.yml", since="^error:")


def test_an_image_without_swarmtrain(answer: Answer, base: str) -> None:
    """An image without swarmtrain in it

    It has Python, and nothing of ours. The deploy is taken back.
    """
    answer.config(f"runner: {{nodes: 1, docker_config: {{docker_container: '{base}'}}}}")
    answer("swarmtrain deploy config.yml", since="^error:", changes="home/state", timeout=120)


def test_an_image_without_python(answer: Answer, engine: Engine) -> None:
    """An image without Python

    Nothing of ours can even say so: it is the engine that speaks.
    """
    # Whichever of the two services it is first.
    answer.same(r"; rendezvous on node0: task: non-zero exit \(127\)\n.*", "")
    answer.same("rendezvous on node0: task", "node0 on node0: task")
    answer.same(r"tini \(\d+\)", "tini (7)")
    image = build(engine, "registry.lab:5000/empty:1", {"Dockerfile": "FROM scratch\nCOPY file /file\n", "file": "nothing"})
    answer.config(f"runner: {{nodes: 1, docker_config: {{docker_container: '{image}'}}}}")
    answer("swarmtrain deploy config.yml", since="^error:", changes="home/state", timeout=120)
