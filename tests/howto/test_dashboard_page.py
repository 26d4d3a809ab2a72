"""The page on the dashboard is followed on this machine, with a local run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import page
from conftest import OpenShell
from reader import Reader


def test_dashboard(installed: dict[str, str], open_shell: OpenShell, new_checkout: Callable[[], Path]) -> None:
    steps = page.read("docs/how-to/dashboard.md")
    install = next(number for number, step in enumerate(steps) if step.text.startswith("pip install"))
    folder = new_checkout()
    environment = {**installed, "DOCKER_HOST": f"unix://{folder}/none", "OMP_NUM_THREADS": "1"}
    Reader([open_shell(folder, environment)]).follow([*steps[:install], *steps[install + 1 :]])
    assert '"run":"quickstart"' in (folder / "quickstart.html").read_text()
