"""The tutorial, from an empty home to a lab that is gone again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import built
import page
from conftest import OpenShell
from reader import Reader

from swarmtrain.lab import Lab


def test_the_tutorial(
    default_lab: Lab, environment: dict[str, str], new_checkout: Callable[[], Path], open_shell: OpenShell, shelf: Path
) -> None:
    """Its machine has built the image before, if another suite has: from nothing it is built once."""
    reader = Reader([open_shell(new_checkout(), environment)])
    steps = page.read("docs/tutorial/first-run.md")
    image = next(number for number, step in enumerate(steps) if "image build" in step.text)
    built.give_registry(built.shared())
    reader.follow(steps[:image])
    built.give(default_lab, [node.node for node in default_lab.status()], built.shared())
    reader.follow(steps[image : image + 1])
    built.keep(default_lab, "node0", shelf)
    reader.follow(steps[image + 1 :])
    assert not default_lab.shared.exists()
