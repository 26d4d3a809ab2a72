"""The page on fine-tuning, which needs torch and no lab."""

from __future__ import annotations

import shutil
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from reader import Reader


def test_fine_tune(installed: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("training_code.py", "datautils.py"):
        shutil.copy(page.ROOT / name, here / name)
    Reader([open_shell(here, installed)]).follow(page.read("docs/how-to/fine-tune.md"))
    assert (here / "tokens" / "chats.mask.bin").stat().st_size == (here / "tokens" / "chats.bin").stat().st_size
