"""What a change of a run that is up takes: told by plan, asked for by deploy. With real processes of the local launcher."""

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
from answers import Answer

pytest.importorskip("torch", reason="ranks need torch")

CHAPTER = "The command line"
CONFIG = "runner: {runner_type: local, max_nodes: 2, min_nodes: 1}\ntrainer: {save_interval: 100}\n"
WAIT = "import time\n\ntime.sleep(600)\n"
QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
STATE = "^home/"
Run = Callable[..., str]


def test_a_deploy_that_restarts_what_runs(answer: Answer) -> None:
    """A deploy that restarts what runs

    Where there is no terminal to ask at. `swarmtrain plan` shows the same changes, and changes nothing.
    """
    answer.env |= QUIET
    answer.file("training_code.py", WAIT, show=False)
    answer.config(CONFIG)
    answer("swarmtrain deploy config.yml --detach", code=0, show=False, changes=STATE)
    try:
        answer.file("training_code.py", WAIT + "# edited\n", show=False)
        answer("swarmtrain deploy config.yml -o trainer.save_interval=200", since="^config runs", changes=STATE)
        answer("swarmtrain deploy config.yml -o trainer.save_interval=200 --detach --yes", code=0, show=False, changes=STATE)
    finally:
        answer("swarmtrain down", code=0, show=False, changes=STATE)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Return what runs swarmtrain where a run is up, of one node whose script does nothing, for long."""
    (tmp_path / "config.yml").write_text(CONFIG)
    (tmp_path / "training_code.py").write_text(WAIT)
    root = Path(__file__).parents[2]
    home = {"HOME": str(tmp_path), "DOCKER_HOST": "unix:///nowhere/docker.sock"}
    env = {**os.environ, **QUIET, **home, "PYTHONPATH": str(root), "TERM": "xterm"}

    def call(*words: str, code: int = 0, terminal: int | None = None) -> str:
        before = [] if terminal is None else ["setsid", "--ctty", "--wait"]
        streams = subprocess.PIPE if terminal is None else terminal
        argv = [*before, sys.executable, "-m", "swarmtrain", *words]
        done = subprocess.run(
            argv, cwd=tmp_path, env=env, stdin=terminal, stdout=streams, stderr=streams, text=True, check=False, timeout=120
        )
        assert done.returncode == code, done.stderr
        return done.stdout or ""

    call("deploy", "config.yml", "--detach")
    yield call
    call("down")


def test_plan_tells_what_would_change(run: Run, tmp_path: Path) -> None:
    def told(*words: str) -> list[str]:
        return list(json.loads(run("plan", "config.yml", "--json", *words))["differences"])

    assert told() == []
    assert told("-o", "runner.nodes=2") == ["node1: comes, on local1"]
    (tmp_path / "training_code.py").write_text("# edited")
    assert told("-o", "trainer.save_interval=200") == [
        "trainer.save_interval: 100 → 200, restarts 1 service from the beginning: trainer.save_dir is null",
        "training_code.py: edited, restarts 1 service from the beginning: trainer.save_dir is null",
    ]
    run("deploy", "config.yml", "-o", "runner.nodes=2", "--detach", "--yes")
    run("stop")
    assert told("-o", "trainer.save_interval=200", "-o", "runner.nodes=2") == ["trainer.save_interval: 100 → 200"]


@pytest.mark.parametrize(("said", "code"), [("y\n", 0), ("\n", 1), ("\x03", 130)])
def test_a_person_is_asked(run: Run, tmp_path: Path, said: str, code: int) -> None:
    state = tmp_path / "home" / "swarmtrain" / "config" / "config.json"
    before = state.read_text()
    terminal, its = pty.openpty()

    def answer() -> None:
        shown = b""
        while b"restart 1 service of config? [y/N]" not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, said.encode())

    person = threading.Thread(target=answer, daemon=True)
    person.start()
    run("deploy", "config.yml", "-o", "trainer.save_interval=200", "--detach", code=code, terminal=its)
    os.close(its)
    os.close(terminal)
    assert (state.read_text() != before) is (code == 0)
