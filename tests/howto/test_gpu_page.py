"""The page on GPUs, on a lab whose engines declare some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import built
import page
from conftest import OpenShell
from reader import Reader

from swarmtrain.lab import REGISTRY, Lab


def test_gpus(default_lab: Lab, installed: dict[str, str], new_checkout: Callable[[], Path], open_shell: OpenShell, shelf: Path) -> None:
    built.give_registry(shelf)
    checkout = new_checkout()
    reader = Reader([open_shell(checkout, installed)])
    steps = page.read("docs/how-to/gpus.md")
    up = next(number for number, step in enumerate(steps) if "lab up" in step.text) + 1
    reader.follow(steps[:up])
    if not shelf.exists():  # the tutorial was not followed before
        reader.follow(page.parse(f"```sh\nswarmtrain image build . --tag {REGISTRY}/swarmtrain:latest --push\n```"))
    reader.follow(steps[up:])
    assert not default_lab.shared.exists()
