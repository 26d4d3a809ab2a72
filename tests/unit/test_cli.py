"""The command line as a person meets it: exit codes, data on stdout, talk on stderr, errors with hints, no traceback."""

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


def swarmtrain(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a person would, far from any engine."""
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
    assert swarmtrain("init", "new.yml", cwd=project).returncode == 0
    done = swarmtrain("generate", "new.yml", "-o", "runner.hosts=[a]", "--output", "out/stack.yml", cwd=project)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "wrote out/stack.yml\nnext: docker stack deploy -c out/stack.yml new\n"
    assert (project / "out" / "stack.yml").exists()


def test_init_keeps_what_is_there(project: Path) -> None:
    done = swarmtrain("init", "config.yml", cwd=project)
    assert (done.returncode, done.stderr) == (1, "error: config.yml: exists already\nhint: --force overwrites it\n")


def test_every_config_error_is_shown_with_its_line(project: Path) -> None:
    (project / "config.yml").write_text("runer: 1\ntrainer: {sed: 1}\n")
    done = swarmtrain("plan", "config.yml", cwd=project)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "error: config.yml: config runer (line 1): unknown key; did you mean runner?",
        "error: config.yml: config trainer.sed (line 2): unknown key; did you mean seed?",
    ]


def test_usage_errors_exit_with_2(project: Path) -> None:
    for argv in (["deploy"], ["scale"], ["nonsense"], ["plan", "--nonsense"]):
        done = swarmtrain(*argv, cwd=project)
        assert done.returncode == 2, argv
        assert "Traceback" not in done.stderr


def test_a_missing_script_is_named(project: Path) -> None:
    done = swarmtrain("generate", "config.yml", "-o", "runner.script=nothere.py", cwd=project)
    assert done.returncode == 1
    assert done.stderr.startswith("error: config runner.script: ")


def test_without_an_engine_the_error_says_so_and_what_to_do(project: Path) -> None:
    for argv in (["plan", "config.yml"], ["deploy", "config.yml"], ["status"], ["down"]):
        done = swarmtrain(*argv, cwd=project)
        assert done.returncode == 1, argv
        assert "Traceback" not in done.stderr
        assert "/nonexistent/docker.sock" in done.stderr
        assert "hint: " in done.stderr


def test_plan_as_json_is_data(project: Path) -> None:
    done = swarmtrain("plan", "config.yml", "--json", "-o", "runner.runner_type=local", cwd=project)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["world_size"] == 3
    assert [node["slots"] for node in plan["nodes"]] == [1, 2]
