"""The lab page, on the lab that it starts itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import page
from conftest import OpenShell
from page_runner import PageRunner

from swarmtrain.lab import Lab


def test_the_lab(default_lab: Lab, installed_environment: dict[str, str], copy_checkout: Callable[[], Path], open_shell: OpenShell) -> None:
    PageRunner([open_shell(copy_checkout(), installed_environment)]).run_steps(page.read_page("docs/how-to/lab.md"))
    assert not default_lab.shared_disk.exists()
