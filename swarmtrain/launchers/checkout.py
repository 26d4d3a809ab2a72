"""What the user's project was when a run was brought up: its commit, and what differs from that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from swarmtrain.errors import ProcessError
from swarmtrain.process import run

MOST = 256 * 1024
"""Bytes of a difference that are kept at most."""
_WITHIN = 5.0
_HASH = 12


@dataclass(frozen=True)
class Checkout:
    """A git checkout. `changed`: files that are not as the commit has them, those that it does not know among them."""

    commit: str
    branch: str
    changed: tuple[str, ...]
    diff: str
    """Against the commit, of files that it knows; cut off after MOST bytes."""

    def __str__(self) -> str:
        more = f", {len(self.changed)} file{'s' * (len(self.changed) != 1)} changed" if self.changed else ""
        return f"{self.commit[:_HASH]}{f' on {self.branch}' if self.branch else ''}{more}"


def checkout(folder: Path) -> Checkout | None:
    """Return what the checkout that `folder` is in has; None if it is in none with a commit, or git is not here or too slow."""
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        branch = _git(folder, "rev-parse", "--abbrev-ref", "HEAD").strip()
        changed = [line[3:] for line in _git(folder, "status", "--porcelain", "--untracked-files=normal").splitlines()]
        diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv") if changed else ""
    except ProcessError:
        return None
    return Checkout(commit, "" if branch == "HEAD" else branch, tuple(changed), diff[:MOST])


def _git(folder: Path, *argv: str) -> str:
    # A look at a checkout changes nothing in it, and runs no program that its config names.
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false"]
    return run(["git", *options, "-C", str(folder), *argv], timeout=_WITHIN)
