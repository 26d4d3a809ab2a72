"""Provenance of the user's code at a deploy: its git commit, and the diff of the working tree against this commit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarmtrain.errors import ProcessError
from swarmtrain.process import run_command

MAX_DIFF_BYTES = 256 * 1024
"""Maximum size of a stored diff in bytes."""
_GIT_TIMEOUT_SECONDS = 5.0
_SHORT_HASH_LENGTH = 12


@dataclass(frozen=True)
class GitCheckout:
    """A git checkout: its commit and branch, its `changed_files` (modified or untracked), and their diff."""

    commit: str
    branch: str
    changed_files: tuple[str, ...]
    diff: str
    """Diff of the tracked files against the commit, truncated to MAX_DIFF_BYTES."""

    def __str__(self) -> str:
        changes = f", {len(self.changed_files)} file{'s' * (len(self.changed_files) != 1)} changed" if self.changed_files else ""
        return f"{self.commit[:_SHORT_HASH_LENGTH]}{f' on {self.branch}' if self.branch else ''}{changes}"


def read_git_checkout(folder: Path) -> GitCheckout | None:
    """Return the git checkout that contains `folder`.

    None if there is no checkout with a commit, or git is not installed or too slow.
    """
    try:
        commit = _run_git(folder, "rev-parse", "HEAD").strip()
        branch = _run_git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
        changed_files = [line[3:] for line in _run_git(folder, "status", "--porcelain", "--untracked-files=normal").splitlines()]
        diff = _run_git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv") if changed_files else ""
    except ProcessError:
        return None
    return GitCheckout(commit, "" if branch == "HEAD" else branch, tuple(changed_files), diff[:MAX_DIFF_BYTES])


def _run_git(folder: Path, *argv: str) -> str:
    # Reading a checkout must neither change it nor run a program that its git config names.
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false"]
    return run_command(["git", *options, "-C", str(folder), *argv], timeout=_GIT_TIMEOUT_SECONDS)
