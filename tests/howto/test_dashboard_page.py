"""The dashboard page, followed on this machine with a local run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import page
from conftest import OpenShell
from page_runner import PageRunner


def test_dashboard(installed_environment: dict[str, str], open_shell: OpenShell, copy_checkout: Callable[[], Path]) -> None:
    steps = page.read_page("docs/how-to/dashboard.md")
    install = next(number for number, step in enumerate(steps) if step.text.startswith("pip install"))
    folder = copy_checkout()
    environment = {**installed_environment, "DOCKER_HOST": f"unix://{folder}/none", "OMP_NUM_THREADS": "1"}
    PageRunner([open_shell(folder, environment)]).run_steps([*steps[:install], *steps[install + 1 :]])
    assert '"run":"quickstart"' in (folder / "quickstart.html").read_text()
