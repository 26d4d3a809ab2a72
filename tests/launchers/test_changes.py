"""Changes of a run that is up: plan lists them, deploy asks for confirmation. With real processes of the local launcher."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from error_cases import ErrorCase

pytest.importorskip("torch", reason="ranks need torch")

CHAPTER = "The command line"
CONFIG = "runner: {runner_type: local, max_nodes: 2, min_nodes: 1}\ntrainer: {save_interval: 100}\n"
WAIT_SCRIPT = "import time\n\ntime.sleep(600)\n"
QUIET_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
STATE_FILES = "^home/"
RunCommand = Callable[..., str]


def test_a_deploy_that_restarts_what_runs(error_case: ErrorCase) -> None:
    """Deploy would restart a running service

    The deploy needs confirmation, and there is no terminal to ask for it. `swarmtrain plan` shows the same changes without making them.
    """
    error_case.env |= QUIET_ENVIRONMENT
    error_case.write_file("training_code.py", WAIT_SCRIPT, show=False)
    error_case.write_config(CONFIG)
    error_case("swarmtrain deploy config.yml --detach", code=0, show=False, allowed_changes=STATE_FILES)
    try:
        error_case.write_file("training_code.py", WAIT_SCRIPT + "# edited\n", show=False)
        error_case(
            "swarmtrain deploy config.yml -o trainer.save_interval=200",
            code=2,
            start_pattern="^config is running",
            allowed_changes=STATE_FILES,
        )
        error_case(
            "swarmtrain deploy config.yml -o trainer.save_interval=200 --detach --yes", code=0, show=False, allowed_changes=STATE_FILES
        )
    finally:
        error_case("swarmtrain down", code=0, show=False, allowed_changes=STATE_FILES)


@pytest.fixture
def run_command(tmp_path: Path) -> Iterator[RunCommand]:
    """Return a function that runs swarmtrain next to a local run of one node, whose script only sleeps."""
    (tmp_path / "config.yml").write_text(CONFIG)
    (tmp_path / "training_code.py").write_text(WAIT_SCRIPT)
    root = Path(__file__).parents[2]
    home = {"HOME": str(tmp_path), "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    env = {**os.environ, **QUIET_ENVIRONMENT, **home, "PYTHONPATH": str(root), "TERM": "xterm"}

    def call(*arguments: str, code: int = 0, terminal: int | None = None) -> str:
        before = [] if terminal is None else ["setsid", "--ctty", "--wait"]
        streams = subprocess.PIPE if terminal is None else terminal
        argv = [*before, sys.executable, "-m", "swarmtrain", *arguments]
        done = subprocess.run(
            argv, cwd=tmp_path, env=env, stdin=terminal, stdout=streams, stderr=streams, text=True, check=False, timeout=120
        )
        assert done.returncode == code, done.stderr
        return done.stdout or ""

    call("deploy", "config.yml", "--detach")
    yield call
    call("down")


def test_plan_shows_what_would_change(run_command: RunCommand, tmp_path: Path) -> None:
    def list_differences(*arguments: str) -> list[str]:
        return list(json.loads(run_command("plan", "config.yml", "--json", *arguments))["differences"])

    assert list_differences() == []
    assert list_differences("-o", "runner.nodes=2") == ["node1: added on localhost"]
    (tmp_path / "training_code.py").write_text("# edited")
    assert list_differences("-o", "trainer.save_interval=200") == [
        "trainer.save_interval: 100 → 200, restarts 1 service from the beginning: trainer.save_dir is null",
        "training_code.py: changed, restarts 1 service from the beginning: trainer.save_dir is null",
    ]
    run_command("deploy", "config.yml", "-o", "trainer.save_dir=runs", "--detach", "--yes")
    assert list_differences("-o", "trainer.save_dir=runs", "-o", "trainer.save_interval=200") == [
        "trainer.save_interval: 100 → 200, restarts 1 service although it has not reported a checkpoint yet"
    ]
    run_command("deploy", "config.yml", "-o", "runner.nodes=2", "--detach", "--yes")
    run_command("stop")
    assert list_differences("-o", "trainer.save_interval=200", "-o", "runner.nodes=2") == ["trainer.save_interval: 100 → 200"]


@pytest.mark.parametrize(("typed", "code"), [("y\n", 0), ("\n", 1), ("\x03", 130)])
def test_a_person_is_asked_for_confirmation(run_command: RunCommand, tmp_path: Path, typed: str, code: int) -> None:
    state = tmp_path / "home" / "swarmtrain" / "config" / "config.json"
    before = state.read_text()
    terminal, its = pty.openpty()

    def answer() -> None:
        shown = b""
        while b"restart 1 service of config? [y/N]" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, typed.encode())

    person = threading.Thread(target=answer, daemon=True)
    person.start()
    run_command("deploy", "config.yml", "-o", "trainer.save_interval=200", "--detach", code=code, terminal=its)
    os.close(its)
    os.close(terminal)
    assert (state.read_text() != before) is (code == 0)
