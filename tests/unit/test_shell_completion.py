"""Shell completion, through the protocol that shells use, and once in a real bash with the script installed."""

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

from swarmtrain.cli import shell_completion
from swarmtrain.lab import state

PROGRAM = Path(sys.executable).with_name("swarmtrain")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder with a run and a lab, and in it the working directory `here` with configs."""
    for path in ("here/config.yml", "here/other.yaml", "here/notes.txt", "here/more/deep.yml", "state/swarmtrain/demo/local.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")  # a record without fields is one of another version
    (tmp_path / "labs" / "lab").mkdir(parents=True)
    state.write_lab_description(tmp_path / "labs" / "lab", state.LabDescription("lab", "10.77.3.0/24", ("node0", "node1"), "/srv/shared"))
    return tmp_path


def build_shell_environment(home: Path, **extra: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG")}
    folders = {"HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "SWARMTRAIN_LAB_DIR": str(home / "labs")}
    no_engine = {"DOCKER_HOST": f"unix://{home}/no.sock", "PATH": f"{PROGRAM.parent}{os.pathsep}{inherited['PATH']}"}
    return {**inherited, **folders, **no_engine, **extra}


def complete_words(home: Path, *words: str, **extra: str) -> list[str]:
    """Return the completions that bash gets for the last of `words`, which bash has split at each `=`."""
    completion_environment = {
        "_SWARMTRAIN_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(("swarmtrain", *words)),
        "COMP_CWORD": str(len(words)),
    }
    done = subprocess.run(
        [PROGRAM],
        cwd=home / "here",
        env=build_shell_environment(home, **completion_environment, **extra),
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
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
        (["lab", "power-off", ""], ["node0", "node1"]),
        (["lab", "down", "--name", ""], ["lab"]),
        (["plan", "config.yml", "-o", "trainer.save_i"], ["trainer.save_interval", "trainer.save_in_background"]),
        (["plan", "config.yml", "-o", "runner.no"], ["runner.nodes=", "runner.nodes=…"]),
        (["plan", "config.yml", "-o", "runner.runner_type", "="], ["swarm", "docker", "local", "ssh", "ssh_docker", "slurm"]),
        (["plan", "config.yml", "-o", "runner.runner_type", "=", "l"], ["local"]),
        (["plan", "config.yml", "-o", "runner.nodes", "=", "3", "-o", "runner.swarm.gpu", "=", "r"], ["reserve"]),
    ],
)
def test_what_bash_is_offered(home: Path, words: list[str], expected: list[str]) -> None:
    assert complete_words(home, *words) == expected


def test_completion_in_corner_cases(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "here")
    assert shell_completion.complete_config_files("nowhere/") == []
    assert shell_completion.complete_config_files("./c") == [("./config.yml", "")]
    assert [word for word, _ in shell_completion.complete_overrides("logger.use_wandb=")] == [
        "logger.use_wandb=true",
        "logger.use_wandb=false",
    ]
    assert [word for word, _ in shell_completion.complete_overrides("runner.script_a")] == ["runner.script_args=", "runner.script_args=…"]
    assert shell_completion.complete_overrides("no.such=") == shell_completion.complete_overrides("no.such") == []


def test_other_shells_show_what_a_key_is(home: Path) -> None:
    asked = {"_SWARMTRAIN_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "swarmtrain plan config.yml -o runner.runner_type=l"}
    done = subprocess.run([PROGRAM], env=build_shell_environment(home, **asked), check=False, capture_output=True, text=True)
    assert '"runner.runner_type=local"' in done.stdout
    asked["_TYPER_COMPLETE_ARGS"] = "swarmtrain plan config.yml -o trainer.s"
    done = subprocess.run([PROGRAM], env=build_shell_environment(home, **asked), check=False, capture_output=True, text=True)
    assert '"trainer.seed":"Seed of parameter initialization and sample order."' in done.stdout


def test_an_engine_that_does_not_answer_is_not_waited_for(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        assert complete_words(home, "status", "", DOCKER_HOST=f"tcp://127.0.0.1:{silent.getsockname()[1]}") == ["demo"]
        assert time.monotonic() - began < 30, "about a second on a machine that does nothing else; the engine's own limit is a minute"


def test_a_real_bash(home: Path) -> None:
    """Installed as documented, in a terminal."""
    subprocess.run(["bash", "-c", "swarmtrain --install-completion; :"], env=build_shell_environment(home), check=True, capture_output=True)
    typed = [(b"swarmtrain plan config.yml -o runner.runner_t\t", "runner.runner_type="), (b"lo\t", "local ")]
    type_into_bash(home, [(b"", "here"), *typed])


def type_into_bash(home: Path, steps: list[tuple[bytes, str]]) -> None:
    """Type into an interactive bash, and wait after each step until its terminal shows the expected text."""
    terminal, theirs = pty.openpty()
    plain = {"TERM": "dumb", "INPUTRC": "/dev/null"}
    argv = ["bash", "--rcfile", str(home / ".bashrc"), "-i"]
    bash = subprocess.Popen(
        argv,
        cwd=home / "here",
        env=build_shell_environment(home, **plain),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        for keys, expected in steps:
            os.write(terminal, keys)
            output, deadline = "", time.monotonic() + 60
            while expected not in re.sub(r" \r|\a", "", output):  # without line wraps and bells
                assert time.monotonic() < deadline, output
                if select.select([terminal], [], [], 0.2)[0]:
                    output += os.read(terminal, 65536).decode(errors="replace")
    finally:
        bash.kill()
        bash.wait()
        os.close(terminal)
