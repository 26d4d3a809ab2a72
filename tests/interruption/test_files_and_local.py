"""Ctrl-C, SIGTERM and a closed terminal, at every stage of the commands that need no swarm: nothing is left half-done."""

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
from interrupt import EFFECTS, IMPORTS, ROOT, SIGNALS, at_each, at_event, at_line
from processes import below

# Trains for ever, and saves when it is asked to leave.
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
    for pid in processes(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def processes(folder: Path) -> list[int]:
    """Return all living processes of the runs of a test whose folder is `folder`."""
    return below(folder / "home")


def keepers(folder: Path) -> list[str]:
    """Return the specs of those who keep a process of a run below `folder` going."""
    told = [Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0") for pid in processes(folder)]
    return sorted(Path(line).name for line in told if "host.keeper" in line)


def swarmtrain(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "swarmtrain", *argv], cwd=cwd, capture_output=True, text=True, check=False, env=env)


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_from_its_first_moment_on_a_command_ends_quietly(project: Path) -> None:
    before = tree(project)
    interrupted = 0
    for at in range(1, 2000, 16):
        ended = at_event(SIGNALS[at % len(SIGNALS)], at, IMPORTS, "plan", "config.yml", cwd=project)
        assert (ended.code in (0, 130), "Traceback" in ended.err) == (True, False), (at, ended.err)
        interrupted += ended.interrupted
        if not ended.interrupted:
            break
    assert interrupted > 5
    assert tree(project) == before


def test_init_and_generate_leave_the_old_file_or_the_new_one(project: Path) -> None:
    assert swarmtrain("generate", "config.yml", cwd=project).returncode == 0
    override = ("-o", "runner.env.A=b")
    assert swarmtrain("generate", "config.yml", *override, "--output", "new/generated.yml", cwd=project).returncode == 0
    old, new = (tree(project / name)["generated.yml"] for name in ("compose", "new"))
    interrupted = 0
    for ended in at_each(EFFECTS, "generate", "config.yml", *override, cwd=project):
        interrupted += ended.interrupted
        stack = (project / "compose" / "generated.yml").read_bytes()
        assert stack in (old, new)
        named = [line.split()[-1] for line in stack.decode().splitlines() if "file: generated/" in line]
        assert all((project / "compose" / name).exists() for name in named)
    assert interrupted >= 4
    assert tree(project / "compose") == tree(project / "new")


def test_deploy_leaves_nothing_or_a_run_that_goes_on(project: Path, tmp_path: Path) -> None:
    interrupted = 0
    for ended in at_each(EFFECTS, "deploy", "config.yml", "--detach", cwd=project):
        interrupted += ended.interrupted
        if ended.interrupted:
            assert "interrupted: nothing of it is left" in ended.err
            assert swarmtrain("status", cwd=project).returncode == 1
        else:
            assert swarmtrain("status", cwd=project).returncode == 0
            assert swarmtrain("down", cwd=project).returncode == 0
        assert processes(tmp_path) == []
    assert interrupted > 10


@pytest.mark.parametrize("number", SIGNALS)
def test_who_follows_detaches_and_the_run_goes_on(project: Path, tmp_path: Path, number: signal.Signals) -> None:
    ended = at_line("Ctrl-C detaches", "deploy", "config.yml", cwd=project, number=number)
    assert (ended.code, "Traceback" in ended.err) == (130, False)
    assert "detached; config goes on" in ended.err
    assert swarmtrain("status", cwd=project).returncode == 0
    assert processes(tmp_path)


@pytest.mark.test_all_only("interrupts three commands at every change that they make; the gate does so with deploy")
def test_scale_stop_and_down_can_be_repeated(project: Path, tmp_path: Path) -> None:
    assert swarmtrain("deploy", "config.yml", "--detach", cwd=project).returncode == 0
    assert all(ended.code in (0, 130) for ended in at_each(EFFECTS, "scale", "--nodes", "2", cwd=project))
    listed = [line.split()[0] for line in swarmtrain("status", cwd=project).stdout.splitlines()]
    assert [name for name in listed if name.startswith("node")] == ["node0", "node1"]
    for command, left in (("stop", ["rendezvous.spec"]), ("down", [])):
        for ended in at_each(EFFECTS, command, cwd=project):
            if ended.interrupted:
                assert f"interrupted: swarmtrain {command} config again" in ended.err
        assert keepers(tmp_path) == left
    assert swarmtrain("status", cwd=project).returncode == 1


def test_a_run_that_does_not_end_can_be_left_alone(project: Path, tmp_path: Path) -> None:
    deaf = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(99)\n"
    (project / "training_code.py").write_text(deaf)
    assert swarmtrain("deploy", "config.yml", "--detach", cwd=project).returncode == 0
    end = time.monotonic() + 60
    while "deaf" not in swarmtrain("logs", cwd=project).stdout and time.monotonic() < end:
        time.sleep(0.2)
    ended = at_line("taking config down", "down", cwd=project, after=1.0)
    assert (ended.code, ended.seconds < 3) == (130, True)
    assert processes(tmp_path)
    assert swarmtrain("down", cwd=project).returncode == 0
    assert processes(tmp_path) == []


def test_two_deploys_at_once_make_one_run(project: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "swarmtrain", "deploy", "config.yml", "--detach"]
    both = [subprocess.Popen(argv, cwd=project, env={**os.environ, "PYTHONPATH": str(ROOT)}) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert keepers(tmp_path) == ["node0.spec", "rendezvous.spec"]
    assert swarmtrain("down", cwd=project).returncode == 0
    assert processes(tmp_path) == []
