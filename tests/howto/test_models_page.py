"""The page on models out and in, which needs torch and no lab."""

from __future__ import annotations

import shutil
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from reader import Reader


def test_models(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(page.ROOT / name, here / name)
    Reader([open_shell(here, installed)]).follow(page.read("docs/how-to/models.md"))
    shown = (tmp_path / "shells" / "0.txt").read_text()
    assert "UNEXPECTED" not in shown
    assert "MISSING" not in shown
