"""The tutorial, from an empty home to a lab that is gone again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import images
import page
from conftest import OpenShell
from reader import Reader

from swarmtrain.lab import Lab


def test_the_tutorial(
    default_lab: Lab, environment: dict[str, str], new_checkout: Callable[[], Path], open_shell: OpenShell, shelf: Path
) -> None:
    reader = Reader([open_shell(new_checkout(), environment)])
    steps = page.read("docs/tutorial/first-run.md")
    image = next(number for number, step in enumerate(steps) if "image build" in step.text) + 1
    reader.follow(steps[:image])
    images.keep(default_lab, "node0", shelf)
    reader.follow(steps[image:])
    assert not default_lab.shared.exists()
