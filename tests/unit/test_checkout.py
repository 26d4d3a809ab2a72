"""What a project was when a run was brought up: its commit and what differs from it, and nothing where there is no git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swarmtrain.launchers.checkout import MOST, checkout


def git(folder: Path, *argv: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    return subprocess.run(["git", *who, "-C", str(folder), *argv], check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_is_told_with_its_changes(tmp_path: Path) -> None:
    assert checkout(tmp_path) is None
    git(tmp_path, "init", "-q", "-b", "main")
    assert checkout(tmp_path) is None, "there is no commit"
    (tmp_path / "train.py").write_text("rate = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    commit = git(tmp_path, "rev-parse", "HEAD")
    found = checkout(tmp_path)
    assert found
    assert (str(found), found.diff) == (f"{commit[:12]} on main", "")
    (tmp_path / "train.py").write_text("rate = 2\n")
    (tmp_path / "new file.py").write_text("")
    (tmp_path / "inside").mkdir()
    found = checkout(tmp_path / "inside")
    assert found
    assert str(found) == f"{commit[:12]} on main, 2 files changed"
    assert "-rate = 1\n+rate = 2\n" in found.diff
    (tmp_path / "train.py").write_text("x\n" * MOST)
    git(tmp_path, "checkout", "-q", "--detach")
    found = checkout(tmp_path)
    assert found
    assert (found.branch, len(found.diff)) == ("", MOST)


def test_nothing_is_started_that_a_checkout_names(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("a")
    (tmp_path / ".gitattributes").write_text("a diff=evil\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    for key in ("diff.external", "diff.evil.textconv", "diff.evil.command", "core.fsmonitor"):
        git(tmp_path, "config", key, f"touch {tmp_path}/started; false")
    (tmp_path / "a").write_text("b")
    assert checkout(tmp_path)
    assert not (tmp_path / "started").exists()
