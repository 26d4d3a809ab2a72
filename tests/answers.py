"""What swarmtrain answers to bad input, run for real and kept in docs/reference/errors.md: the page is the golden record.

A case is a test with the fixture `answer`, in a module that has a CHAPTER. Its docstring is a title and, after an empty
line, what is wrong. What it does becomes its section of the page:

    def test_unknown_key(answer: Answer) -> None:
        '''Unknown key

        A key that no section has.
        '''
        answer.config("runer: {}")
        answer("swarmtrain plan config.yml")

REFRESH=1 writes the section; without it the test compares. Sections are those of all modules, found by reading them, so
that the page is whole whichever suites run.
"""

from __future__ import annotations

import ast
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

import forked

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
"""Where cases are looked for, and their order within a chapter."""

_PROGRAMS = {"swarmtrain": ["-m", "swarmtrain"], "python": []}
_USAGE, _FAILED = errors.EXIT_USAGE, errors.EXIT_JOB_FAILED
_SECTION = re.compile(r"^### (.+)\n((?:(?!^##).*\n?)*)", re.MULTILINE)
# What is another thing at each run, and what stands for it on the page.
_NEVER_THE_SAME = (
    (r"\b(?=\w*\d)[0-9a-f]{64}\b", "DIGEST"),
    (r"(127\.0\.0\.1|localhost):\d{4,5}\b", r"\1:PORT"),
    (r"\b\d+\.\d+ s\b", "N s"),
    (r"(: (?:starting|training|done|failed)) (for|after) (?:\d+ min )?\d+ s", r"\1 \2 N s"),
)


@dataclass(frozen=True)
class Case:
    """A section of the page, and the test that makes it."""

    chapter: str
    title: str
    story: str
    test: str
    """Its node id without parameters: tests/mistakes/test_bad_configs.py::test_unknown_key."""


def cases() -> list[Case]:
    """Return every case there is, in the order of the page."""
    found = [case for folder in FOLDERS for path in sorted((ROOT / "tests" / folder).glob("test_*.py")) for case in _cases_in(path)]
    return sorted(found, key=lambda case: CHAPTERS.index(case.chapter))


def _cases_in(path: Path) -> Iterator[Case]:
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
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and "answer" in [each.arg for each in node.args.args]:
            assert chapter, f"{path}: has cases and no CHAPTER"
            title, _, story = (ast.get_docstring(node) or "").partition("\n\n")
            assert story, f"{path}: {node.name} needs a docstring, a title and what is wrong"
            yield Case(chapter, title, " ".join(story.split()), f"{path.relative_to(ROOT)}::{node.name}")


def sections() -> dict[str, str]:
    """Return what the page holds now: title to text."""
    return {title: text.strip("\n") for title, text in _SECTION.findall(PAGE.read_text() if PAGE.exists() else "")}


def page(texts: Mapping[str, str]) -> str:
    """Return the whole page, with `texts` (by title) as the sections of all cases."""
    parts = [_head()]
    for chapter in CHAPTERS:
        inside = [case for case in cases() if case.chapter == chapter]
        parts += [f"## {chapter}"] * bool(inside)
        parts += [f"### {case.title}\n\n{texts.get(case.title, '')}".rstrip() for case in inside]
    return "\n\n".join(parts) + "\n"


def _head() -> str:
    tree = textwrap.dedent((errors.__doc__ or "").partition("\n\n")[2].rpartition("\n\nA traceback")[0])
    return f"""\
# What goes wrong, and what is answered

Every answer below was printed by the command above it: the page is made by the tests that run them, and compared with
them at each run. An error names the place, the reason, and the next step where that is not plain from the two.
A traceback of swarmtrain's own is a bug. A command that ends with an error has changed nothing, unless it says so.

| exit code | what it means |
| --- | --- |
| {errors.EXIT_OK} | done |
| {errors.EXIT_ERROR} | an error of the config, the files, the cluster: `error: PLACE: REASON` and `hint: NEXT STEP` |
| {errors.EXIT_USAGE} | the command line itself cannot be read |
| {errors.EXIT_JOB_FAILED} | the job failed; its own exit code is in the message, and in `--json` |
| {errors.EXIT_INTERRUPTED} | interrupted by Ctrl-C or SIGTERM |

In Python, all are of one tree, in `swarmtrain.errors`:

```text
{tree.strip()}
```"""


class Answer:
    """One case: a project folder with a script in it, what is done there, and the section that this makes."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.project = folder / "project"
        self.home = folder / "home"
        self.env = {"DOCKER_HOST": "unix:///nowhere/docker.sock", "XDG_STATE_HOME": str(self.home / "state")}
        """Environment of the commands, beside PATH. Not shown on the page."""
        self.python = sys.executable
        self.forked = False
        """Whether programs start from a process that has imported what they need."""
        self.limits: dict[int, int] = {}
        """Limits of the commands: resource.RLIMIT_FSIZE to bytes, for instance."""
        self._parts = [case.story]
        self._situation: list[str] = []
        self._same: list[tuple[str, str]] = []
        for made in (self.project, self.home):
            made.mkdir(mode=0o755)
        self.file("training_code.py", "print('hello')\n", show=False)

    def config(self, text: str, name: str = "config.yml") -> None:
        """Write the config, and show it."""
        self.file(name, textwrap.dedent(text), show=False)
        self.show(textwrap.dedent(text), "yaml")

    def file(self, name: str, content: str | bytes, *, show: bool = True) -> Path:
        """Write a file of the project, and show it (text only) under its name."""
        path = self.project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        if show and isinstance(content, str):
            self.say(f"`{name}`:")
            self.show(content, "python" if name.endswith(".py") else "yaml")
        return path

    def say(self, sentence: str) -> None:
        """Put a paragraph here."""
        self._parts.append(sentence)

    def show(self, text: str, language: str = "text") -> None:
        """Put a block of text here."""
        self._parts.append(f"```{language}\n{text.strip()}\n```")

    def situation(self, command: str) -> None:
        """Run a shell command in the project, and show it above the next command of ours. It must succeed."""
        subprocess.run(["sh", "-ec", command], cwd=self.project, check=True, capture_output=True)
        self._situation.append(f"$ {command}")

    def export(self, name: str, value: str) -> None:
        """Set an environment variable of all commands from here on, and show that."""
        self.env[name] = value
        self._situation.append(f"$ export {name}={shlex.quote(value)}")

    def same(self, pattern: str, replacement: str) -> None:
        """From here on, show what matches `pattern` as `replacement`: it is another at each run."""
        self._same.append((pattern, replacement))

    def __call__(
        self,
        command: str,
        *,
        code: int = errors.EXIT_ERROR,
        hint: bool = True,
        since: str = "",
        only: str = "",
        changes: str | None = None,
        nobody: bool = False,
        show: bool = True,
        timeout: float = 300,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command`, a line that begins with swarmtrain or python, hold its answer to the rules, and show it.

        `code` is the exit code that it must have. `hint`: the answer must name a next step; False where place and reason
        tell all. `since`: show stderr from the first line that matches this, for what comes before is progress. `only`: show
        of both outputs the lines that match this, stdout's first.
        `changes`: pattern of the paths, relative to the case's folder, that may be others afterwards. `nobody`: run it as
        a user who owns nothing. `show`: False for an answer that the page has already. `timeout` in seconds.
        """
        before = self._snapshot()
        done = self._run(command, nobody, timeout)
        assert done.returncode == code, f"exit code {done.returncode} instead of {code} from {command}\n{done.stdout}\n{done.stderr}"
        _hold_to_the_rules(done.stderr, code, hint)
        after = self._snapshot()
        changed = sorted(path for path in before | after if before.get(path) != after.get(path))
        left = [path for path in changed if changes is None or not re.search(changes, path)]
        assert not left, f"{command} has changed {', '.join(left)}"
        if show:
            lines = (done.stdout + done.stderr if only else done.stderr).splitlines()
            self._record(command, self._normal("\n".join(line for line in lines if re.search(only, line))), code, since)
        return done

    def finish(self) -> None:
        """Compare the section with the page's, or write it there with REFRESH=1."""
        text = "\n\n".join(self._parts)
        if os.environ.get("REFRESH"):
            PAGE.write_text(page({**sections(), self.case.title: text}))
        now = sections().get(self.case.title)
        assert now == text, f"{PAGE.relative_to(ROOT)} says something else of `{self.case.title}`; REFRESH=1 writes it anew"

    def _run(self, command: str, nobody: bool, timeout: float) -> subprocess.CompletedProcess[str]:
        if nobody:
            for folder in takewhile(lambda folder: not folder.stat().st_mode & stat.S_IXOTH, self.project.parents):
                folder.chmod(0o711)  # pytest lets nobody through
        program, *arguments = shlex.split(command)
        env = {"PATH": os.environ["PATH"], "HOME": str(self.home), "PYTHONPATH": str(ROOT), "COLUMNS": "140", **self.env}
        argv = [program, *arguments] if program == "swarmtrain" else arguments
        if nobody or (self.forked and argv[0] != "-m"):
            return forked.run(argv, cwd=self.project, env=env, limits=self.limits, nobody=nobody, timeout=timeout)
        return subprocess.run(
            [self.python, *_PROGRAMS[program], *arguments],
            cwd=self.project,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=timeout,
            preexec_fn=self._limit if self.limits else None,
        )

    def _limit(self) -> None:
        for kind, most in self.limits.items():
            resource.setrlimit(kind, (most, most))

    def _normal(self, text: str) -> str:
        named = ((re.escape(f"{self.home}/state"), "~/.local/state"), (re.escape(str(self.project)), "/home/you/project"))
        for pattern, replacement in (*named, *self._same, *_NEVER_THE_SAME):
            text = re.sub(pattern, replacement, text)
        return text

    def _record(self, command: str, shown: str, code: int, since: str) -> None:
        lines = shown.rstrip("\n").split("\n")
        first = next((number for number, line in enumerate(lines) if re.search(since, line)), None)
        assert first is not None, f"nothing in this matches {since!r}\n{shown}"
        answer = (["…"] if first else []) + lines[first:]
        situation = [self._normal(line) for line in self._situation]
        self.show("\n".join([*situation, f"$ {command}", *answer, f"[exit code {code}]"]))
        self._situation.clear()

    def _snapshot(self) -> dict[str, str]:
        root = self.project.parent
        return {str(path.relative_to(root)): _fingerprint(path) for path in [self.project, self.home, *root.rglob("*")]}


def _hold_to_the_rules(shown: str, code: int, hint: bool) -> None:
    assert "Traceback" not in shown, shown
    assert "pydantic" not in shown, shown
    if code == _USAGE:
        assert "Error: " in shown, shown
        return
    if code in (errors.EXIT_OK, errors.EXIT_INTERRUPTED):
        return
    lines = shown.splitlines()
    told = [line for line in lines if line.startswith("error: ") or (code == _FAILED and " failed with exit code " in line)]
    assert told, f"no error in this\n{shown}"
    for line in told:
        assert re.search(r": \S", line.removeprefix("error: ")), f"no place in: {line}"
    assert not hint or any(line.startswith("hint: ") for line in lines), f"no hint in this\n{shown}"


def _fingerprint(path: Path) -> str:
    """Return what must not change of a file: its kind, mode and owner, and its content where it has one of readable size."""
    facts = path.lstat()
    content = ""
    if path.is_file() and not path.is_symlink() and facts.st_size < 1 << 22:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    size = 0 if path.is_dir() else facts.st_size
    return f"{facts.st_mode} {facts.st_uid} {size} {content}"
