"""What TAB offers, through the protocol that the shells speak, and once in a real bash with the script installed."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swarmtrain.cli import completion
from swarmtrain.lab import state

PROGRAM = Path(sys.executable).with_name("swarmtrain")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder to type in, with configs, and a home of the same user with a run and a lab."""
    for path in ("here/config.yml", "here/other.yaml", "here/notes.txt", "here/more/deep.yml", "state/swarmtrain/demo/local.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "labs" / "lab").mkdir(parents=True)
    state.write(tmp_path / "labs" / "lab", state.Description("lab", "10.77.3.0/24", ("node0", "node1"), "/srv/shared"))
    return tmp_path


def environment(home: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    folders = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "SWARMTRAIN_LAB_DIR": str(home / "labs")}
    nobody = {"DOCKER_HOST": f"unix://{home}/no.sock", "PATH": f"{PROGRAM.parent}{os.pathsep}{kept['PATH']}"}
    return {**kept, **folders, **nobody, **more}


def offered(home: Path, *words: str, **more: str) -> list[str]:
    """Return what bash is offered for the last of `words`, which it has cut at each `=`."""
    asked = {"_SWARMTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(("swarmtrain", *words)), "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [PROGRAM], cwd=home / "here", env=environment(home, **asked, **more), check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sta"], ["status"]),
        (["plan", ""], ["config.yml", "other.yaml", "more/"]),
        (["plan", "m"], ["more/deep.yml"]),
        (["status", ""], ["demo"]),
        (["lab", "kill", ""], ["node0", "node1"]),
        (["lab", "down", "--name", ""], ["lab"]),
        (["plan", "config.yml", "-o", "trainer.save_i"], ["trainer.save_interval", "trainer.save_in_background"]),
        (["plan", "config.yml", "-o", "runner.no"], ["runner.nodes=", "runner.nodes=…"]),
        (["plan", "config.yml", "-o", "runner.runner_type", "="], ["swarm", "docker", "local", "pdsh", "pdsh_docker", "slurm"]),
        (["plan", "config.yml", "-o", "runner.runner_type", "=", "l"], ["local"]),
        (["plan", "config.yml", "-o", "runner.nodes", "=", "3", "-o", "runner.swarm.gpu", "=", "r"], ["reserve"]),
    ],
)
def test_what_bash_is_offered(home: Path, words: list[str], expected: list[str]) -> None:
    assert offered(home, *words) == expected


def test_what_is_offered_in_the_corners(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "here")
    assert completion.configs("nowhere/") == []
    assert completion.configs("./c") == [("./config.yml", "")]
    assert [word for word, _ in completion.overrides("logger.use_wandb=")] == ["logger.use_wandb=true", "logger.use_wandb=false"]
    assert [word for word, _ in completion.overrides("runner.script_a")] == ["runner.script_args=", "runner.script_args=…"]
    assert completion.overrides("no.such=") == completion.overrides("no.such") == []


def test_other_shells_are_told_what_a_key_is(home: Path) -> None:
    asked = {"_SWARMTRAIN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "swarmtrain plan config.yml -o runner.runner_type=l"}
    done = subprocess.run([PROGRAM], env=environment(home, **asked), check=False, capture_output=True, text=True)
    assert '"runner.runner_type=local"' in done.stdout
    asked["_TYPER_COMPLETE_ARGS"] = "swarmtrain plan config.yml -o trainer.s"
    done = subprocess.run([PROGRAM], env=environment(home, **asked), check=False, capture_output=True, text=True)
    assert '"trainer.seed":"Seed of parameters and of the order of samples."' in done.stdout


def test_an_engine_that_does_not_answer_is_not_waited_for(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert offered(home, "status", "", DOCKER_HOST=f"tcp://127.0.0.1:{silent.getsockname()[1]}") == ["demo"]
        assert time.monotonic() - began < 30, "about a second on a machine that does nothing else; the engine's own limit is a minute"


def test_a_real_bash(home: Path) -> None:
    """Installed as the page says, in a terminal."""
    subprocess.run(["bash", "-c", "swarmtrain --install-completion; :"], env=environment(home), check=True, capture_output=True)
    typed = [(b"swarmtrain plan config.yml -o runner.runner_t\t", "runner.runner_type="), (b"lo\t", "local ")]
    tabbed(home, [(b"", "here"), *typed])


def tabbed(home: Path, steps: list[tuple[bytes, str]]) -> None:
    """Type into an interactive bash, and wait after each step until its terminal shows what is wanted."""
    terminal, theirs = pty.openpty()
    plain = {"TERM": "dumb", "INPUTRC": "/dev/null"}
    argv = ["bash", "--rcfile", str(home / ".bashrc"), "-i"]
    bash = subprocess.Popen(
        argv, cwd=home / "here", env=environment(home, **plain), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        for keys, wanted in steps:
            os.write(terminal, keys)
            shown, deadline = "", time.monotonic() + 60
            while wanted not in re.sub(r" \r|\a", "", shown):  # where the line is wrapped; the bell
                assert time.monotonic() < deadline, shown
                if select.select([terminal], [], [], 0.2)[0]:
                    shown += os.read(terminal, 65536).decode(errors="replace")
    finally:
        bash.kill()
        bash.wait()
        os.close(terminal)
