"""The command line where something is unusual: closed streams, a deleted folder, stdin and stdout as files, files of other tools."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from swarmtrain.config.loader import parse_config
from swarmtrain.errors import RunNotFound
from swarmtrain.launchers.common.history_store import RecordedRun, build_operation_event
from swarmtrain.operations.runs import remove_named_run
from swarmtrain.protocol.run_identity import create_run_identity
from swarmtrain.view.formatting import remove_control_characters

PROGRAM = [sys.executable, "-m", "swarmtrain"]
# The program on a machine without a Docker engine, whether or not this machine has one.
ENGINELESS_PROGRAM = [
    sys.executable,
    "-c",
    "from swarmtrain.__main__ import main; from swarmtrain.launchers.common import engine_endpoint;"
    "engine_endpoint.DEFAULT_ADDRESS = 'unix:///nowhere/docker.sock'; main()",
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a config and a script; nothing is known of Docker."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "training_code.py").write_text("print('hello')\n")
    (tmp_path / "config.yml").write_text("runner: {runner_type: local, nodes: 2}\n")
    return tmp_path


def run_program(
    *arguments: str, text: str | None = None, program: Sequence[str] = PROGRAM, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*program, *arguments], input=text, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams(folder: Path, redirection: str) -> None:
    command = f"exec {sys.executable} -m swarmtrain plan config.yml {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert (folder / "config.yml").read_text() == "runner: {runner_type: local, nodes: 2}\n"


@pytest.mark.parametrize("arguments", [["plan", "config.yml"], ["init"], ["demo"], ["generate", "config.yml"]])
def test_a_deleted_working_folder(folder: Path, arguments: list[str]) -> None:
    (folder / "gone").mkdir()
    paths = [str(folder / argument) if argument.endswith(".yml") else argument for argument in arguments]
    script = 'cd gone && rmdir ../gone && exec "$@"'
    done = subprocess.run(["sh", "-c", script, "sh", *PROGRAM, *paths], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_a_terminal_that_knows_only_ascii(folder: Path) -> None:
    (folder / "config.yml").write_text("runner: {runner_type: local, docker_config: {docker_container: é}}\n", encoding="utf-8")
    environment = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = run_program("plan", "config.yml", **environment)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "docker_container" in done.stderr


def test_h_is_help() -> None:
    assert run_program("-h").stdout.startswith("Usage: swarmtrain ")
    assert run_program("image", "build", "-h").stdout.startswith("Usage: swarmtrain image build ")


def test_a_config_from_stdin() -> None:
    done = run_program("plan", "-", "--json", text="runner: {runner_type: local, nodes: 3}")
    assert (json.loads(done.stdout)["run"], json.loads(done.stdout)["world_size"]) == ("stdin", 3)


def test_a_stack_file_on_stdout(folder: Path) -> None:
    (folder / "swarm.yml").write_text("runner: {hosts: [gpu-1]}\n")
    done = run_program("generate", "swarm.yml", "--output", "-")
    run_program("generate", "swarm.yml", "--output", "stack.yml")
    assert done.stdout == (folder / "stack.yml").read_text()
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1]) == ("wrote -", "next: docker stack deploy -c - swarm")
    assert "gpu: none (no host is known to have GPUs; swarmtrain doctor CONFIG looks for them)" in lines
    assert not list(folder.glob(".swarmtrain*"))


@pytest.mark.parametrize("command", ["status nope", "down nope", "stop nope", "scale nope --nodes 2", "logs nope", "why nope"])
def test_an_unknown_run_on_a_machine_without_docker(command: str) -> None:
    done = run_program(*command.split(), program=ENGINELESS_PROGRAM)
    assert done.returncode == 1
    assert done.stderr.startswith("error: run nope: unknown run; existing runs: none\n")


def test_a_run_can_be_taken_down_twice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def find_no_run(name: str | None) -> None:
        raise RunNotFound("unknown run", place=f"run {name}")

    monkeypatch.setattr("swarmtrain.operations.runs.find_run", find_no_run)
    mine = RecordedRun("mine", create_run_identity())
    mine.record_operation(build_operation_event("up"))
    with pytest.raises(RunNotFound):
        remove_named_run("mine", assume_yes=False)
    mine.record_operation(build_operation_event("down"))
    remove_named_run("mine", assume_yes=False)
    assert capsys.readouterr().err == "mine is already removed\n"
    for unknown in ("other", None):
        with pytest.raises(RunNotFound):
            remove_named_run(unknown, assume_yes=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("services: {web: {image: nginx}}", "is a compose file, not a swarmtrain config\nhint: swarmtrain import other.yml"),
        ("distributed_type: MULTI_GPU\nnum_processes: 2", "is an accelerate file, not a swarmtrain config\nhint: swarmtrain import"),
        ("#!/bin/bash\n#SBATCH -N 2\nsrun torchrun x.py", "is an sbatch file, not a swarmtrain config\nhint: swarmtrain import"),
        ("trainer: {dataloader_num_workers: 2}", "has keys of a config of Scaling\nhint: swarmtrain import other.yml converts it"),
    ],
)
def test_a_file_of_another_tool_is_recognized(folder: Path, text: str, message: str) -> None:
    (folder / "other.yml").write_text(text)
    done = run_program("plan", "other.yml")
    assert done.returncode == 1
    assert message in done.stderr


def test_a_misspelled_key_is_not_taken_for_a_file_of_another_tool(folder: Path) -> None:
    (folder / "config.yml").write_text("trainer: {save_dri: runs}\n")
    done = run_program("plan", "config.yml")
    assert "unknown key; did you mean save_dir?" in done.stderr
    assert "import" not in done.stderr


@pytest.mark.parametrize("key", ["num_epochs", "batch_size", "model", "lr"])
def test_no_guess_is_better_than_a_misleading_one(folder: Path, key: str) -> None:
    (folder / "config.yml").write_text(f"trainer: {{{key}: 1}}\n")
    done = run_program("plan", "config.yml")
    assert "did you mean" not in done.stderr
    assert "hint: known keys: " in done.stderr


@pytest.mark.parametrize("mounts", ["[/a, /b, /c, /d]", "[[/a, /b, /c, /d]]", "[[/a, /b], [/c, /d]]"])
def test_four_texts_are_two_mounts(mounts: str) -> None:
    config = parse_config(f"runner: {{docker_config: {{docker_mounts: {mounts}}}}}")
    assert config.runner.docker_config.docker_mounts == (("/a", "/b"), ("/c", "/d"))


def test_labels_of_a_swarm_do_not_matter_elsewhere(folder: Path) -> None:
    (folder / "config.yml").write_text("runner: {runner_type: local, swarm: {labels: {rack: a}}}\n")
    done = run_program("plan", "config.yml")
    assert "  node0  localhost  1      one slot\n" in done.stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]52;c;Y29weQ==\x1b\\text", "text"),
        ("\x9b2Jtext", "text"),
        ("10 %\r20 %\r", "20 %"),
        ("bell\x07 and\x00", "bell\\x07 and\\x00"),
        ("a\tb\nc", "a\tb\nc"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x1b", "\\x1b"),
    ],
)
def test_control_characters_of_a_job(text: str, expected: str) -> None:
    assert remove_control_characters(text) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sample", "nowhere", "--prompt", "x"], "nowhere: is not a folder"),
        (["embed", "nowhere", "--text", "x"], "nowhere: is not a folder"),
        (["export", "nowhere", "out"], "nowhere: has no complete checkpoint"),
        (["evaluate", "config.yml", "--model", "nowhere"], "nowhere: is not a folder"),
        (["sample", ".", "--prompt", "x", "--tokenizer", "none.json"], "none.json: cannot be read: no such file"),
        (["embed", ".", "--text", "x", "--output", "none/x.npy"], "none/x.npy: cannot be written: its folder does not exist"),
    ],
)
def test_paths_of_models_are_checked_before_torch_is_imported(folder: Path, arguments: list[str], message: str) -> None:
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = run_program(*arguments, PYTHONPATH=f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {message}")
