"""The provenance of a project when a run is deployed: its commit and the changes since, and nothing without git."""

from __future__ import annotations

import subprocess
from pathlib import Path

from swarmtrain.launchers.common.provenance import MAX_DIFF_BYTES, read_git_checkout


def run_git(folder: Path, *argv: str) -> str:
    who = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    return subprocess.run(["git", *who, "-C", str(folder), *argv], check=True, capture_output=True, text=True).stdout.strip()


def test_a_checkout_is_recorded_with_its_changes(tmp_path: Path) -> None:
    assert read_git_checkout(tmp_path) is None
    run_git(tmp_path, "init", "-q", "-b", "main")
    assert read_git_checkout(tmp_path) is None, "there is no commit"
    (tmp_path / "train.py").write_text("rate = 1\n")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-qm", "one")
    commit = run_git(tmp_path, "rev-parse", "HEAD")
    found = read_git_checkout(tmp_path)
    assert found
    assert (str(found), found.diff) == (f"{commit[:12]} on main", "")
    (tmp_path / "train.py").write_text("rate = 2\n")
    (tmp_path / "new file.py").write_text("")
    (tmp_path / "inside").mkdir()
    found = read_git_checkout(tmp_path / "inside")
    assert found
    assert str(found) == f"{commit[:12]} on main, 2 files changed"
    assert "-rate = 1\n+rate = 2\n" in found.diff
    (tmp_path / "train.py").write_text("x\n" * MAX_DIFF_BYTES)
    run_git(tmp_path, "checkout", "-q", "--detach")
    found = read_git_checkout(tmp_path)
    assert found
    assert (found.branch, len(found.diff)) == ("", MAX_DIFF_BYTES)


def test_no_program_that_a_checkout_names_is_started(tmp_path: Path) -> None:
    run_git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("a")
    (tmp_path / ".gitattributes").write_text("a diff=evil\n")
    run_git(tmp_path, "add", ".")
    run_git(tmp_path, "commit", "-qm", "one")
    for key in ("diff.external", "diff.evil.textconv", "diff.evil.command", "core.fsmonitor"):
        run_git(tmp_path, "config", key, f"touch {tmp_path}/started; false")
    (tmp_path / "a").write_text("b")
    assert read_git_checkout(tmp_path)
    assert not (tmp_path / "started").exists()
