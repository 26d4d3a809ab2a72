"""The command line as a user sees it: exit codes, data on stdout, messages on stderr. Its errors: tests/mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def project(tmp_path: Path) -> Path:
    (tmp_path / "training_code.py").write_text("print('hello')\n")
    (tmp_path / "config.yml").write_text("runner: {hosts: [a, b slots=2]}\n")
    return tmp_path


def run_swarmtrain(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would, without a reachable engine."""
    nowhere = {
        "PYTHONPATH": str(ROOT),
        "PATH": os.environ["PATH"],
        "DOCKER_HOST": "unix:///nonexistent/docker.sock",
        "XDG_STATE_HOME": str(cwd / "state"),
    }
    return subprocess.run(
        [sys.executable, "-m", "swarmtrain", *argv], cwd=cwd, capture_output=True, text=True, check=False, env={**nowhere, **env}
    )


def test_init_writes_a_config_that_generates(project: Path) -> None:
    assert run_swarmtrain("init", "new.yml", cwd=project).returncode == 0
    overrides = ["-o", "runner.runner_type=swarm", "-o", "runner.hosts=[a]"]
    done = run_swarmtrain("generate", "new.yml", *overrides, "--output", "out/stack.yml", cwd=project)
    assert (done.returncode, done.stdout) == (0, "")
    first, *notes, last = done.stderr.splitlines()
    assert (first, last) == ("wrote out/stack.yml", "next: docker stack deploy -c out/stack.yml new")
    assert [note.partition(",")[0].partition(" (")[0] for note in notes] == ["gpu: none", "placement: fresh"]
    assert (project / "out" / "stack.yml").exists()


def test_plan_as_json_is_data(project: Path) -> None:
    done = run_swarmtrain("plan", "config.yml", "--json", "-o", "runner.runner_type=local", cwd=project)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["world_size"] == 3
    assert [node["slots"] for node in plan["nodes"]] == [1, 2]


def test_a_device_of_no_size(project: Path) -> None:
    refused = run_swarmtrain("memory", "config.yml", "--device-memory", "much", cwd=project)
    assert (refused.returncode, refused.stderr) == (
        1,
        "error: --device-memory: 'much' is not a valid size\nhint: use a size such as 80GiB or 512MiB\n",
    )
