"""Ctrl-C, SIGTERM and a closed terminal, at every stage of the commands that need no swarm: no partial result is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupt import EFFECTS, IMPORTS, ROOT, SIGNALS, interrupt_at_each_event, interrupt_at_event, interrupt_at_line
from processes import find_run_pids, read_command_line
from randomized import SEED

# Runs until a stop is requested, and then exits gracefully.
SCRIPT = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("begun", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "training_code.py").write_text(SCRIPT)
    (folder / "config.yml").write_text("runner: {runner_type: local, nodes: 1, max_nodes: 2, stop_grace: 5}\n")
    yield folder
    for pid in list_run_pids(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def list_run_pids(folder: Path) -> list[int]:
    """Return the pids of all living processes of the runs of a test with the folder `folder`."""
    return find_run_pids(folder / "home")


def list_keeper_specs(folder: Path) -> list[str]:
    """Return the specs of the process keepers of runs below `folder`."""
    command_lines = [read_command_line(pid) for pid in list_run_pids(folder)]
    return sorted(Path(words[-1]).name for words in command_lines if any("remote.process_keeper" in word for word in words))


def run_swarmtrain(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "swarmtrain", *argv], cwd=cwd, capture_output=True, text=True, check=False, env=env)


def read_tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_from_its_first_moment_on_a_command_ends_quietly(project: Path) -> None:
    before = read_tree(project)
    interrupted = 0
    for at in range(1, 2000, 16):
        ended = interrupt_at_event(SIGNALS[at % len(SIGNALS)], at, IMPORTS, "plan", "config.yml", cwd=project)
        assert (ended.code in (0, 130), "Traceback" in ended.err) == (True, False), (at, ended.err)
        interrupted += ended.is_interrupted
        if not ended.is_interrupted:
            break
    assert interrupted > 5
    assert read_tree(project) == before


def test_init_and_generate_leave_the_old_file_or_the_new_one(project: Path) -> None:
    assert run_swarmtrain("generate", "config.yml", cwd=project).returncode == 0
    override = ("-o", "runner.env.A=b")
    assert run_swarmtrain("generate", "config.yml", *override, "--output", "new/generated.yml", cwd=project).returncode == 0
    old, new = (read_tree(project / name)["generated.yml"] for name in ("compose", "new"))
    interrupted = 0
    for ended in interrupt_at_each_event(EFFECTS, "generate", "config.yml", *override, cwd=project):
        interrupted += ended.is_interrupted
        stack = (project / "compose" / "generated.yml").read_bytes()
        assert stack in (old, new)
        named = [line.split()[-1] for line in stack.decode().splitlines() if "file: generated/" in line]
        assert all((project / "compose" / name).exists() for name in named)
    assert interrupted >= 4
    assert read_tree(project / "compose") == read_tree(project / "new")


def test_deploy_leaves_nothing_or_a_run_that_continues(project: Path, tmp_path: Path) -> None:
    interrupted, step = 0, 3 if SEED is None else 1
    for ended in interrupt_at_each_event(EFFECTS, "deploy", "config.yml", "--detach", cwd=project, step=step):
        interrupted += ended.is_interrupted
        if ended.is_interrupted:
            assert "interrupted: " in ended.err
        if "no part of the run remains" in ended.err:
            assert run_swarmtrain("status", cwd=project).returncode == 1
        else:
            assert not ended.is_interrupted or "swarmtrain down config removes it" in ended.err
            assert run_swarmtrain("status", cwd=project).returncode == 0
            assert run_swarmtrain("down", cwd=project).returncode == 0
        assert list_run_pids(tmp_path) == []
    assert interrupted > 30 / step


@pytest.mark.parametrize("number", SIGNALS)
def test_a_follower_detaches_and_the_run_continues(project: Path, tmp_path: Path, number: signal.Signals) -> None:
    ended = interrupt_at_line("Ctrl-C detaches", "deploy", "config.yml", cwd=project, signum=number)
    assert (ended.code, "Traceback" in ended.err) == (130, False)
    assert "detached; config continues" in ended.err
    assert run_swarmtrain("status", cwd=project).returncode == 0
    assert list_run_pids(tmp_path)


@pytest.mark.test_all_only("interrupts three commands at every change that they make; the gate does so with deploy")
def test_scale_stop_and_down_can_be_repeated(project: Path, tmp_path: Path) -> None:
    assert run_swarmtrain("deploy", "config.yml", "--detach", cwd=project).returncode == 0
    assert all(ended.code in (0, 130) for ended in interrupt_at_each_event(EFFECTS, "scale", "--nodes", "2", cwd=project))
    listed = [line.split()[0] for line in run_swarmtrain("status", cwd=project).stdout.splitlines()]
    assert [name for name in listed if name.startswith("node")] == ["node0", "node1"]
    for command, left in (("stop", ["rendezvous.spec"]), ("down", [])):
        for ended in interrupt_at_each_event(EFFECTS, command, cwd=project):
            if ended.is_interrupted:
                assert f"interrupted: swarmtrain {command} config again" in ended.err
        assert list_keeper_specs(tmp_path) == left
    assert run_swarmtrain("status", cwd=project).returncode == 1


def test_a_run_that_does_not_end_can_be_left_alone(project: Path, tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(99)\n"
    (project / "training_code.py").write_text(deaf)
    assert run_swarmtrain("deploy", "config.yml", "--detach", cwd=project).returncode == 0
    end = time.monotonic() + 60
    while "deaf" not in run_swarmtrain("logs", cwd=project).stdout and time.monotonic() < end:
        time.sleep(0.2)
    ended = interrupt_at_line("removing config from", "down", cwd=project, delay=1.0)
    assert (ended.code, ended.seconds < 3) == (130, True)
    assert list_run_pids(tmp_path)
    assert run_swarmtrain("down", cwd=project).returncode == 0
    assert list_run_pids(tmp_path) == []


def test_two_deploys_at_once_make_one_run(project: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "swarmtrain", "deploy", "config.yml", "--detach"]
    both = [subprocess.Popen(argv, cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)}) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert list_keeper_specs(tmp_path) == ["node0.spec", "rendezvous.spec"]
    assert run_swarmtrain("down", cwd=project).returncode == 0
    assert list_run_pids(tmp_path) == []
