"""The page about launchers and metrics sinks from other packages, which needs torch and no lab."""

from __future__ import annotations

import os
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from page_runner import PageRunner
from toy_package import install_toy_package  # lies next to this folder


def test_plugins(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    here.mkdir()
    packages = install_toy_package(tmp_path / "packages")  # instead of pip install
    python_path = os.pathsep.join(filter(None, (str(packages), installed_environment.get("PYTHONPATH"))))
    PageRunner([open_shell(here, {**installed_environment, "PYTHONPATH": python_path})]).run_steps(page.read_page("docs/how-to/plugins.md"))
    assert [line.split()[1] for line in (here / "logs" / "losses.txt").read_text().splitlines()] == ["1", "2", "3", "4", "5"]
