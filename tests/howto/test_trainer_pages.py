"""The pages on models and on fine-tuning, which need torch and no lab."""

from __future__ import annotations

from pathlib import Path

import page
import pytest
from conftest import OpenShell
from page_runner import PageRunner

pytest.importorskip("torch")


def test_fine_tune(installed_environment: dict[str, str], open_shell: OpenShell, trainer_folder: Path) -> None:
    PageRunner([open_shell(trainer_folder, installed_environment)]).run_steps(page.read_page("docs/how-to/fine-tune.md"))
    tokens = trainer_folder / "tokens"
    assert (tokens / "chats.mask.bin").stat().st_size == (tokens / "chats.bin").stat().st_size


def test_models(installed_environment: dict[str, str], open_shell: OpenShell, trainer_folder: Path, tmp_path: Path) -> None:
    PageRunner([open_shell(trainer_folder, installed_environment)]).run_steps(page.read_page("docs/how-to/models.md"))
    shown = (tmp_path / "shells" / "0.txt").read_text()
    assert "UNEXPECTED" not in shown
    assert "MISSING" not in shown
