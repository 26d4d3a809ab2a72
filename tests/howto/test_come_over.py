"""The page on coming over, which needs no lab: what is imported is only read."""

from __future__ import annotations

from pathlib import Path

import page
from conftest import OpenShell
from reader import Reader


def test_come_over(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    steps = page.read("docs/how-to/come-over.md")
    Reader([open_shell(tmp_path / "here", installed)]).follow(steps)
    assert sum(step.kind == "see" for step in steps) == 6
