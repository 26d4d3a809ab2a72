"""Metrics sinks of other packages: the sink of the how-to page receives each step of a training run, and broken ones are refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from toy_package import install_toy_package, write_metadata  # lies next to this folder
from worlds import ROOT, merge_config


def train(folder: Path, config: dict[str, Any], sinks: Any) -> subprocess.CompletedProcess[str]:
    """Train three steps in one process with `sinks`, with the packages in `folder`/packages installed."""
    asked = merge_config(config, trainer={"train_iterations": 3, "save_dir": None}, logger={"log_dir": "logs"})
    asked["logger"] |= {"sinks": sinks, "audit_dir": None}
    (folder / "config.yml").write_text(yaml.safe_dump(asked))
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder / 'packages'}"}
    command = [sys.executable, str(ROOT / "training_code.py"), "config.yml"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=170, check=False)


def test_a_sink_of_another_package_receives_each_step(tmp_path: Path, config: dict[str, Any]) -> None:
    install_toy_package(tmp_path / "packages")
    done = train(tmp_path, config, {"text_file": {"name": "losses.txt"}})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in (tmp_path / "logs" / "losses.txt").read_text().splitlines()]
    assert [line[1] for line in lines] == ["1", "2", "3"]
    assert all(float(line[3]) > 0 for line in lines)


def test_an_unknown_sink_is_refused_with_all_that_exist(tmp_path: Path, config: dict[str, Any]) -> None:
    install_toy_package(tmp_path / "packages")
    done = train(tmp_path, config, ["other"])
    assert done.returncode == 1
    assert "config logger.sinks: unknown sink other; existing sinks: csv, tensorboard, wandb, text_file" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.test_all_only("one more way to fail")
def test_a_broken_sink_is_an_error_that_names_its_package(tmp_path: Path, config: dict[str, Any]) -> None:
    write_metadata(tmp_path / "packages", "swarmtrain-broken", "2.0", {"swarmtrain.metrics_sinks": {"broken": "a_missing_module:Sink"}})
    done = train(tmp_path, config, ["broken"])
    assert done.returncode == 1
    assert "broken (a_missing_module:Sink of package swarmtrain-broken 2.0): cannot be imported: ModuleNotFoundError" in done.stderr
