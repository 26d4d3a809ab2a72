"""The lab's page, on the lab that it brings up itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import page
from conftest import OpenShell
from reader import Reader

from swarmtrain.lab import Lab


def test_the_lab(default_lab: Lab, installed: dict[str, str], new_checkout: Callable[[], Path], open_shell: OpenShell) -> None:
    Reader([open_shell(new_checkout(), installed)]).follow(page.read("docs/how-to/lab.md"))
    assert not default_lab.shared.exists()
