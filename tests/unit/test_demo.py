"""`swarmtrain demo`: its folder, and what it does where a lab cannot start. The demo itself is run by tests/howto/test_demo.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmtrain.errors import LabError
from swarmtrain.lab import Lab, prerequisites
from swarmtrain.operations import demo


@pytest.fixture
def local_demos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders in which the demo ran on local nodes; nothing is trained."""
    monkeypatch.chdir(tmp_path)
    folders: list[Path] = []

    def run_demo_locally(*, assume_yes: bool) -> int:
        folders.append(Path.cwd())
        return 0

    monkeypatch.setattr(demo, "_run_demo_locally", run_demo_locally)
    return folders


def test_an_earlier_run_is_kept(local_demos: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2):
        checkpoint = Path("runs/quickstart/step-00000100")
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(str(number))
        demo.run_demo(Path(), use_lab=False, assume_yes=True)
    assert [Path(f"runs/quickstart-{number}/step-00000100/manifest.json").read_text() for number in (1, 2)] == ["1", "2"]
    assert not Path("runs/quickstart").exists()
    assert "runs/quickstart exists: renamed to runs/quickstart-2" in capsys.readouterr().err
    assert len(local_demos) == 2


def test_local_nodes_where_the_lab_fails_to_start(
    local_demos: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bring_up(*_: object, **__: object) -> None:
        raise LabError("Operation not permitted", place="ip netns add st-demo")

    monkeypatch.setattr(demo, "list_missing_packages", list)
    monkeypatch.setattr(Lab, "check_prerequisites", lambda self: None)
    monkeypatch.setattr(Lab, "bring_up", bring_up)
    assert demo.run_demo(Path("new"), use_lab=None, assume_yes=True) == 0
    assert local_demos == [Path.cwd()]
    assert "the lab cannot run here: running the same job as 3 nodes on this machine" in capsys.readouterr().err
    with pytest.raises(LabError, match="Operation not permitted"):
        demo.run_demo(Path(), use_lab=True, assume_yes=True)


def test_only_what_is_missing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a program that most systems have, such as mount, and the one that builds the base image."""
    commands: list[list[str]] = []
    monkeypatch.setattr(prerequisites.shutil, "which", lambda program, **_: None if program in ("mount", "mmdebstrap") else program)
    monkeypatch.setattr(demo, "_run_installer", lambda command, _: commands.append(command))
    demo._install_system_packages(assume_yes=True)
    assert commands[-1][-2:] == ["mmdebstrap", "mount"]
    assert commands[-1][-3].startswith("-")


def test_the_lines_of_an_installer_are_shown_while_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    demo._run_installer(["sh", "-c", "echo Get:1 package; echo noise; echo '  Setting up package'"], lines.append)
    assert lines == ["Get:1 package", "Setting up package"]
