"""The metrics page, which needs torch and no lab."""

from __future__ import annotations

import json
from pathlib import Path

import page
import pytest
from conftest import OpenShell
from page_runner import PageRunner


def test_metrics(installed_environment: dict[str, str], open_shell: OpenShell, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    here = tmp_path / "here"
    here.mkdir()
    PageRunner([open_shell(here, installed_environment)]).run_steps(page.read_page("docs/how-to/metrics.md"))
    lines = [json.loads(line) for line in (here / "logs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 31)]
    assert {line["samples"] for line in lines} == {32}
    assert list((here / "logs" / "tensorboard").iterdir())
    assert list((here / "logs" / "wandb").glob("offline-run-*/*.wandb"))
