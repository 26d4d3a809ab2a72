"""Wrong configs, files and arguments reach the command line: exit code 0, 1 or 2, an error with a place, and nothing left behind.

The commands run in this process, without an engine, Slurm or a host that lets anyone in. A traceback fails the test as it is.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import strategies as st
from invalid_inputs import HOSTILE_STRINGS, OVERRIDES, config_texts, permissive_configs
from randomized import count_examples, run_examples
from test_fuzz_imports import FILES, FIXTURES

from swarmtrain.cli import run_command_line
from swarmtrain.config.schema.runner_types import BUILT_IN_LAUNCHERS
from swarmtrain.errors import EXIT_ERROR, EXIT_OK, EXIT_USAGE
from swarmtrain.importers import SourceFormat

EXAMPLES = count_examples(fixed=150, seeded=1200)
ARGUMENTS = st.one_of(st.sampled_from(HOSTILE_STRINGS), st.text(max_size=12)).map(
    lambda word: word.replace("\0", "").encode(errors="replace").decode()
)
"""What a shell can pass as an argument: no NUL, no half of a character."""


SHARES = {"plan": 2, "generate": 3, "import": 2, "init": 1, "deploy": 1}
"""How often each command is tried, in ninths of all examples."""


@st.composite
def command_lines(draw: st.DrawFn, verb: str) -> list[str]:
    """Return the arguments of the command `verb` that reads `config.yml`, and writes nothing elsewhere than in its folder."""
    if verb == "import":
        format_name = draw(st.sampled_from([None, None, None, *SourceFormat, "other"]))
        words = ["import", "theirs", *(["--from", str(format_name)] if format_name else [])]
        return [*words, *draw(st.sampled_from([[], ["--json"], ["--output", "out.yml"], ["--output", "missing/out.yml"]]))]
    if verb == "init":
        return ["init", *draw(st.sampled_from([[], ["new.yml"], ["missing/new.yml"], ["--preset", "gpt2"], ["--preset", draw(ARGUMENTS)]]))]
    if verb == "deploy":
        return ["deploy", *draw(st.sampled_from([["missing.yml"], [], ["config.yml", "--attach", "-1"], ["config.yml", "--nothing"]]))]
    kinds = [*BUILT_IN_LAUNCHERS] if verb == "generate" else ["swarm", "local", "docker", "slurm"]
    kind = draw(st.sampled_from([None, *kinds]))
    words = [verb, "config.yml", *(["-o", f"runner.runner_type={kind}"] if kind else [])]
    overrides = draw(st.lists(OVERRIDES, max_size=2))
    words += [word for override in overrides for word in ("-o", override.replace("\0", "").encode(errors="replace").decode())]
    words += draw(st.sampled_from([[], [], [], ["--name", draw(ARGUMENTS)], ["--debug"], [draw(ARGUMENTS)]]))
    return [*words, *(draw(st.sampled_from([[], ["--json"]])) if verb == "plan" else ["--output", "made/stack.yml"])]


class CommandFuzzer:
    """Runs commands in a folder, and counts their exit codes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.exit_codes: Counter[str] = Counter()
        self.monkeypatch = monkeypatch

    def try_command(self, argv: list[str], config: bytes, theirs: bytes) -> None:
        files = {"config.yml": config, "theirs": theirs, "training_code.py": b"# code\n", "datautils.py": b"# code\n", "key": b"secret\n"}
        for name, content in files.items():
            (self.folder / name).write_bytes(content)
        before = self.read_files()
        code, stderr = self.call_command(argv)
        self.exit_codes[f"{argv[0]} {code}"] += 1
        assert code in (EXIT_OK, EXIT_ERROR, EXIT_USAGE), stderr
        assert "Traceback" not in stderr
        if code == EXIT_ERROR:
            check_stderr(stderr)
        if code != EXIT_OK:
            assert self.read_files() == before, stderr
        self.remove_files()

    def call_command(self, argv: list[str]) -> tuple[int, str]:
        """Return the exit code of a command, and what it prints on stderr."""
        self.monkeypatch.setattr(sys, "argv", ["swarmtrain", *argv])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as stderr:
            return run_command_line(), stderr.getvalue()

    def read_files(self) -> dict[str, bytes]:
        """Return the files of the project, and those that are kept of runs."""
        return {str(path): path.read_bytes() for path in self.folder.parent.rglob("*") if path.is_file()}

    def remove_files(self) -> None:
        for path in sorted(self.folder.rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()


def check_stderr(stderr: str) -> None:
    """Each error is `error: PLACE: REASON`; a hint follows one."""
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert errors, stderr
    assert all(line.removeprefix("error: ").partition(": ")[2] for line in errors), stderr
    hints = [number for number, line in enumerate(lines) if line.startswith("hint:")]
    assert all(line.removeprefix("hint:").strip() for line in lines if line.startswith("hint:")), stderr
    assert 0 not in hints, stderr


def test_no_command_gives_a_traceback_or_leaves_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, programs = tmp_path / "project", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shell = CommandFuzzer(folder, monkeypatch)
    theirs = st.one_of(FILES, st.sampled_from([text.encode() for text in FIXTURES.values()]))
    configs = st.one_of(config_texts(), permissive_configs())
    for verb, share in SHARES.items():
        examples = EXAMPLES * share // sum(SHARES.values())
        run_examples(shell.try_command, command_lines(verb), configs, theirs, suite="fast", examples=examples)
    print(", ".join(f"{count} × {what}" for what, count in sorted(shell.exit_codes.items())))
    codes = Counter[str]()
    for what, count in shell.exit_codes.items():
        codes[what.split()[1]] += count
    assert codes["0"], "some commands are valid: how many depends on what the machine has"
    assert codes["1"] >= EXAMPLES // 5
    assert codes["2"] >= 1
