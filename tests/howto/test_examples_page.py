"""The page of examples, which needs torch and no lab; their results are as good as it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from reader import Reader


def test_examples(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    shutil.copytree(page.ROOT / "examples", here / "examples")
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(page.ROOT / name, here / name)
    Reader([open_shell(here, installed)]).follow(page.read("docs/how-to/examples.md"))
    transcript = (tmp_path / "shells" / "0.txt").read_text()
    right = [float(percent) for percent in re.findall(r"held-out accuracy ([\d.]+) %", transcript)]
    assert len(right) == 2
    assert min(right) >= 97
