"""The tutorial, from an empty home directory to a removed lab."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import image_cache
import page
from conftest import OpenShell
from page_runner import PageRunner

from swarmtrain.lab import Lab


def test_the_tutorial(
    default_lab: Lab, environment: dict[str, str], copy_checkout: Callable[[], Path], open_shell: OpenShell, image_cache_folder: Path
) -> None:
    """The machine may have the image from another suite: it is built from scratch only once."""
    reader = PageRunner([open_shell(copy_checkout(), environment)])
    steps = page.read_page("docs/tutorial/first-run.md")
    image = next(number for number, step in enumerate(steps) if "image build" in step.text)
    image_cache.restore_registry(image_cache.find_shared_cache())
    reader.run_steps(steps[:image])
    image_cache.restore_images(default_lab, [node.node for node in default_lab.get_status()], image_cache.find_shared_cache())
    reader.run_steps(steps[image : image + 1])
    image_cache.save_images(default_lab, "node0", image_cache_folder)
    reader.run_steps(steps[image + 1 :])
    assert not default_lab.shared_disk.exists()
