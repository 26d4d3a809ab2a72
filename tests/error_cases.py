"""The output of swarmtrain on bad input, from real runs, kept in docs/reference/errors.md: the page is the golden record.

A case is a test with the fixture `error_case`, in a module that has a CHAPTER. Its docstring is a title and, after an empty
line, a description. What the test does becomes its section of the page:

    def test_unknown_key(error_case: ErrorCase) -> None:
        '''Unknown key

        A key that no section has.
        '''
        error_case.write_config("runer: {}")
        error_case("swarmtrain plan config.yml")

REFRESH=1 writes the section; without it the test compares. The list of sections comes from parsing all modules, so the page
is complete whichever suites run.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import os
import re
import resource
import shlex
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import preloaded_fork
import pytest

from swarmtrain import errors

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
CHAPTERS = (
    "The config",
    "The files it names",
    "The command line",
    "The engine and the swarm",
    "The image",
    "The nodes",
    "Scripts and checkpoints",
)
FOLDERS = ("mistakes", "launchers", "lab")
"""The folders with cases, in their order within a chapter."""

_PYTHON_ARGUMENTS = {"swarmtrain": ["-m", "swarmtrain"], "python": []}
_EXIT_USAGE, _EXIT_JOB_FAILED = errors.EXIT_USAGE, errors.EXIT_JOB_FAILED
_SECTION_PATTERN = re.compile(r"^### (.+)\n((?:(?!^##).*\n?)*)", re.MULTILINE)
# Patterns of output that differs in each run, and their replacements on the page.
_VOLATILE_PATTERNS = (
    (r"\b(?=\w*\d)[0-9a-f]{64}\b", "DIGEST"),
    (r"(127\.0\.0\.1|localhost):\d{4,5}\b", r"\1:PORT"),
    (r"\b\d+\.\d+ s\b", "N s"),
    (r"(?m)^· \d\d:\d\d:\d\d ", "· 22:34:16 "),
    (r"(: (?:starting|training|done|failed)) (for|after) (?:\d+ min )?\d+ s", r"\1 \2 N s"),
)


@dataclass(frozen=True)
class ErrorSection:
    """A section of the page, and the test that generates it."""

    chapter: str
    title: str
    description: str
    test_id: str
    """The test's node id without parameters: tests/mistakes/test_bad_configs.py::test_unknown_key."""


def collect_sections() -> list[ErrorSection]:
    """Return all sections, in the order of the page."""
    found = [case for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py")) for case in _find_sections(path)]
    return sorted(found, key=lambda case: CHAPTERS.index(case.chapter))


def _find_sections(path: Path) -> Iterator[ErrorSection]:
    tree = ast.parse(path.read_text())
    chapter = next(
        (
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CHAPTER"
        ),
        None,
    )
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and "error_case" in [each.arg for each in node.args.args]:
            assert chapter, f"{path}: has cases and no CHAPTER"
            title, _, story = (ast.get_docstring(node) or "").partition("\n\n")
            assert story, f"{path}: {node.name} needs a docstring, a title and what is wrong"
            yield ErrorSection(chapter, title, " ".join(story.split()), f"{path.relative_to(ROOT)}::{node.name}")


def read_sections() -> dict[str, str]:
    """Return the current sections of the page: title → text."""
    return {title: text.strip("\n") for title, text in _SECTION_PATTERN.findall(PAGE.read_text() if PAGE.exists() else "")}


def render_page(texts_by_title: Mapping[str, str]) -> str:
    """Return the whole page, with the section texts in `texts_by_title`."""
    blocks = [_render_header()]
    for chapter in CHAPTERS:
        chapter_sections = [case for case in collect_sections() if case.chapter == chapter]
        blocks += [f"## {chapter}"] * bool(chapter_sections)
        blocks += [f"### {case.title}\n\n{texts_by_title.get(case.title, '')}".rstrip() for case in chapter_sections]
    return "\n\n".join(blocks) + "\n"


def _render_header() -> str:
    tree = textwrap.dedent((errors.__doc__ or "").partition("\n\n")[2].rpartition("\n\nA traceback")[0])
    return f"""\
# Error reference

Every answer below was printed by the command above it: tests run the commands, write this page, and compare it at each run.
An error names the place, the reason and, unless it is obvious, the next step. A traceback of swarmtrain's own is a bug.
A command that ends with an error has changed nothing, unless it says so.

| exit code | what it means |
| --- | --- |
| {errors.EXIT_OK} | done |
| {errors.EXIT_ERROR} | an error of the config, the files, the cluster: `error: PLACE: REASON` and `hint: NEXT STEP` |
| {errors.EXIT_USAGE} | the command line is invalid, or a change must be confirmed and there is no terminal |
| {errors.EXIT_JOB_FAILED} | the job failed; its own exit code is in the message, and in `--json` |
| {errors.EXIT_INTERRUPTED} | interrupted by Ctrl-C or SIGTERM |

In Python, all exceptions belong to one tree, in `swarmtrain.errors`:

```text
{tree.strip()}
```"""


class ErrorCase:
    """An error case: a project folder with a script, the commands that run there, and the section that they generate."""

    def __init__(self, section: ErrorSection, folder: Path) -> None:
        self.section = section
        self.project = folder / "project"
        self.home = folder / "home"
        self.env = {"DOCKER_HOST": "unix:///nowhere/docker.sock", "XDG_STATE_HOME": str(self.home / "state")}
        """Environment variables of the commands, besides PATH. Not shown on the page."""
        self.python = sys.executable
        self.use_preloaded_fork = False
        """Whether programs are forked from a process that has already imported their modules."""
        self.resource_limits: dict[int, int] = {}
        """Resource limits of the commands, for example resource.RLIMIT_FSIZE → bytes."""
        self._blocks = [section.description]
        self._setup_lines: list[str] = []
        self._replacements: list[tuple[str, str]] = []
        for path in (self.project, self.home):
            path.mkdir(mode=0o755)
        self.write_file("training_code.py", "print('hello')\n", show=False)

    def write_config(self, text: str, name: str = "config.yml") -> None:
        """Write the config, and add it to the section."""
        self.write_file(name, textwrap.dedent(text), show=False)
        self.add_code_block(textwrap.dedent(text), "yaml")

    def write_file(self, name: str, content: str | bytes, *, show: bool = True) -> Path:
        """Write a file of the project. If it is text and `show` is true, add it to the section under its name."""
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        if show and isinstance(content, str):
            self.add_paragraph(f"`{name}`:")
            self.add_code_block(content, "python" if name.endswith(".py") else "yaml")
        return path

    def add_paragraph(self, text: str) -> None:
        """Add a paragraph to the section."""
        self._blocks.append(text)

    def add_code_block(self, text: str, language: str = "text") -> None:
        """Add a code block to the section."""
        self._blocks.append(f"```{language}\n{text.strip()}\n```")

    def run_setup(self, command: str) -> None:
        """Run a shell command in the project, and show it above the next swarmtrain command. It must succeed."""
        subprocess.run(["sh", "-ec", command], cwd=self.project, check=True, capture_output=True)
        self._setup_lines.append(f"$ {command}")

    def set_variable(self, name: str, value: str) -> None:
        """Set an environment variable for all following commands, and show that."""
        self.env[name] = value
        self._setup_lines.append(f"$ export {name}={shlex.quote(value)}")

    def add_replacement(self, pattern: str, replacement: str) -> None:
        """In all following output, replace matches of `pattern`, which differ in each run, by `replacement`."""
        self._replacements.append((pattern, replacement))

    def __call__(
        self,
        command: str,
        *,
        code: int = errors.EXIT_ERROR,
        expect_hint: bool = True,
        start_pattern: str = "",
        line_pattern: str = "",
        allowed_changes: str | None = None,
        as_nobody: bool = False,
        show: bool = True,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command`, a line that begins with swarmtrain or python, check its output, and add both to the section.

        `code`: the expected exit code. `expect_hint`: the output must have a hint; False if place and reason suffice.
        `start_pattern`: show stderr from the first line that matches; the lines before it are progress. `line_pattern`: show the
        matching lines of both stdout and stderr, stdout's first.
        `allowed_changes`: a pattern of the paths, relative to the case's folder, that the command may change. `as_nobody`: run it
        as a user without permissions. `show`: False if the page already has this output. `timeout`: in seconds.
        """
        before = self._snapshot_files()
        result = self._run_command(command, as_nobody, timeout)
        assert result.returncode == code, (
            f"exit code {result.returncode} instead of {code} from {command}\n{result.stdout}\n{result.stderr}"
        )
        _check_error_format(result.stderr, code, expect_hint)
        after = self._snapshot_files()
        changed = sorted(path for path in before | after if before.get(path) != after.get(path))
        unexpected = [path for path in changed if allowed_changes is None or not re.search(allowed_changes, path)]
        assert not unexpected, f"{command} has changed {', '.join(unexpected)}"
        if show:
            lines = (result.stdout + result.stderr if line_pattern else result.stderr).splitlines()
            self._record_output(
                command, self._normalize_output("\n".join(line for line in lines if re.search(line_pattern, line))), code, start_pattern
            )
        return result

    def finish_section(self) -> None:
        """Compare the section with the page's, or write it to the page with REFRESH=1."""
        text = "\n\n".join(self._blocks)
        if os.environ.get("REFRESH"):
            PAGE.write_text(render_page({**read_sections(), self.section.title: text}))
        recorded = read_sections().get(self.section.title)
        if recorded != text:
            difference = "\n".join(difflib.ndiff((recorded or "").splitlines(), text.splitlines()))
            pytest.fail(f"{PAGE.relative_to(ROOT)} has another text for `{self.section.title}`; REFRESH=1 rewrites it\n{difference}")

    def _run_command(self, command: str, as_nobody: bool, timeout: float) -> subprocess.CompletedProcess[str]:
        if as_nobody:
            for folder in takewhile(lambda folder: not folder.stat().st_mode & stat.S_IXOTH, self.project.parents):
                folder.chmod(0o711)  # pytest's folders do not let other users through
        program, *arguments = shlex.split(command)
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "PYTHONPATH": str(ROOT), "COLUMNS": "140", **self.env}
        argv = [program, *arguments] if program == "swarmtrain" else arguments
        if as_nobody or (self.use_preloaded_fork and argv[0] != "-m"):
            return preloaded_fork.run_preloaded(
                argv, cwd=self.project, env=env, resource_limits=self.resource_limits, as_nobody=as_nobody, timeout=timeout
            )
        return subprocess.run(
            [self.python, *_PYTHON_ARGUMENTS[program], *arguments],
            cwd=self.project,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            preexec_fn=self._apply_resource_limits if self.resource_limits else None,
        )

    def _apply_resource_limits(self) -> None:
        for kind, limit in self.resource_limits.items():
            resource.setrlimit(kind, (limit, limit))

    def _normalize_output(self, text: str) -> str:
        named = ((re.escape(f"{self.home}/state"), "~/.local/state"), (re.escape(str(self.project)), "/home/you/project"))
        for pattern, replacement in (*named, *self._replacements, *_VOLATILE_PATTERNS):
            text = re.sub(pattern, replacement, text)
        return text

    def _record_output(self, command: str, output: str, code: int, start_pattern: str) -> None:
        lines = output.rstrip("\n").split("\n")
        first = next((number for number, line in enumerate(lines) if re.search(start_pattern, line)), None)
        assert first is not None, f"nothing in this matches {start_pattern!r}\n{output}"
        answer = (["…"] if first else []) + lines[first:]
        setup_lines = [self._normalize_output(line) for line in self._setup_lines]
        self.add_code_block("\n".join([*setup_lines, f"$ {command}", *answer, f"[exit code {code}]"]))
        self._setup_lines.clear()

    def _snapshot_files(self) -> dict[str, str]:
        root = self.project.parent
        return {str(path.relative_to(root)): _fingerprint_file(path) for path in [self.project, self.home, *root.rglob("*")]}


def _check_error_format(stderr: str, code: int, expect_hint: bool) -> None:
    assert "Traceback" not in stderr, stderr
    assert "pydantic" not in stderr, stderr
    if code == _EXIT_USAGE and "Error: " in stderr:  # printed by Typer
        return
    if code in (errors.EXIT_OK, errors.EXIT_INTERRUPTED):
        return
    lines = stderr.splitlines()
    error_lines = [line for line in lines if line.startswith("error: ") or (code == _EXIT_JOB_FAILED and " failed with exit code " in line)]
    assert error_lines, f"no error in this\n{stderr}"
    for line in error_lines:
        assert re.search(r": \S", line.removeprefix("error: ")), f"no place in: {line}"
    assert not expect_hint or any(line.startswith("hint: ") for line in lines), f"no hint in this\n{stderr}"


def _fingerprint_file(path: Path) -> str:
    """Return what must not change in a file: type, mode, owner, size, and the content if it is small."""
    status = path.lstat()
    content = ""
    if path.is_file() and not path.is_symlink() and status.st_size < 1 << 22:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    size = 0 if path.is_dir() else status.st_size
    return f"{status.st_mode} {status.st_uid} {size} {content}"
