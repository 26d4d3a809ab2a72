"""The migration page, which needs no lab: what is imported is only read."""

from __future__ import annotations

from pathlib import Path

import page
from conftest import OpenShell
from page_runner import PageRunner


def test_migrate_from_other_tools(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    steps = page.read_page("docs/how-to/migrate.md")
    PageRunner([open_shell(tmp_path / "here", installed_environment)]).run_steps(steps)
    assert sum(step.kind == "see" for step in steps) == 8
