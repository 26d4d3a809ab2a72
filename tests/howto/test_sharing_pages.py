"""The pages on sharing GPUs, on sharing a cluster and on Slurm's commands, on labs with one machine or two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import image_cache
import page
import pytest
from conftest import OpenShell
from page_runner import PageRunner

from swarmtrain.lab import REGISTRY_ADDRESS, Lab


@pytest.mark.parametrize("name", ["docs/how-to/gpus.md", "docs/how-to/share-a-cluster.md", "docs/how-to/move-from-slurm.md"])
def test_sharing(
    default_lab: Lab,
    installed_environment: dict[str, str],
    copy_checkout: Callable[[], Path],
    open_shell: OpenShell,
    image_cache_folder: Path,
    *,
    name: str,
) -> None:
    image_cache.restore_registry(image_cache_folder)
    checkout = copy_checkout()
    reader = PageRunner([open_shell(checkout, installed_environment)])
    steps = page.read_page(name)
    up = next(number for number, step in enumerate(steps) if "lab up" in step.text) + 1
    reader.run_steps(steps[:up])
    if not image_cache_folder.exists():  # the tutorial's test did not run before
        options = f'--base "$(swarmtrain lab base-image)" --tag {REGISTRY_ADDRESS}/swarmtrain:latest --push'
        reader.run_steps(page.parse_page(f"```sh\nswarmtrain image build . {options}\n```"))
    reader.run_steps(steps[up:])
    assert not default_lab.shared_disk.exists()
