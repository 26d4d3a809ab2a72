"""The profiling page, which needs torch and no lab."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from page_runner import PageRunner


def test_profile(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    (here / "examples").mkdir(parents=True)
    for name in ("examples/quickstart.yml", "training_code.py", "datautils.py"):
        shutil.copy(page.ROOT / name, here / name)
    PageRunner([open_shell(here, installed_environment)]).run_steps(page.read_page("docs/how-to/profile.md"))
    [trace] = here.rglob("profile.json")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "aten::" in trace.with_suffix(".txt").read_text()
