"""The page on notifications, which needs torch and no lab."""

from __future__ import annotations

from pathlib import Path

import page
import pytest
from conftest import OpenShell
from page_runner import PageRunner


def test_notify(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    here.mkdir()
    PageRunner([open_shell(here, installed_environment)]).run_steps(page.read_page("docs/how-to/notify.md"))
    assert [line.partition(" |")[0] for line in (here / "received.log").read_text().splitlines()] == ["run.test", "run.outcome"]
