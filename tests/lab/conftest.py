"""A real lab for the tests of this folder, brought up once, and the image in its registry, built and pushed once.

Where this machine can host no lab, the tests skip and say why; with CI=true they fail instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swarmtrain import images
from swarmtrain.errors import LabError
from swarmtrain.lab import REGISTRY, Lab
from swarmtrain.launchers.engine import Engine

IMAGE = f"{REGISTRY}/swarmtrain:test"
ROOT = Path(__file__).parents[2]


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


@pytest.fixture(scope="session")
def new_lab(request: pytest.FixtureRequest) -> Callable[[str], Lab]:
    """Return a function that makes labs of this test run alone; what is left of one is removed at the end.

    The process id in the name keeps runs side by side apart.
    """

    def make(name: str) -> Lab:
        lab = Lab(f"{name}-{os.getpid()}")
        try:
            lab.check()
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
    lab = new_lab("test")
    lab.up(3, say=say)
    return lab


@pytest.fixture(scope="session")
def engine(lab: Lab) -> Engine:
    """The engine of the lab's manager."""
    return Engine(lab.docker_host("node0"), timeout=600)


@pytest.fixture(scope="session")
def image(engine: Engine) -> str:
    """The image of this repository, in the lab's registry; every node can pull it."""
    images.build(engine.client, ROOT, IMAGE, say=say)
    images.push(engine.client, IMAGE, say=say)
    return IMAGE
