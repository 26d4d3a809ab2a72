"""A process keeper stops its process when the folder of the run was deleted, and for no other reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarmtrain.remote.folder_monitor import FolderMonitor
from swarmtrain.remote.process_spec import ProcessSpec

_CHECK_SECONDS = 0.1
_KEEPER_PROGRAM = f"""
import sys
from pathlib import Path
from swarmtrain.remote.process_keeper import ProcessKeeper
sys.exit(ProcessKeeper(Path(sys.argv[1]), check_seconds={_CHECK_SECONDS}).run_process_with_restarts())
"""
_CHILD_PROGRAM = 'trap "echo stopped >> $0; exit 75" TERM; echo $$ > $0; while :; do sleep 0.1; done'


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process keeper in the folder `runs/demo`, whose child process writes its pid, and then that it was stopped, to the file `child`."""
    folder, child_file = tmp_path / "runs/demo", tmp_path / "child"
    folder.mkdir(parents=True)
    argv = ["sh", "-c", _CHILD_PROGRAM, str(child_file)]
    ProcessSpec("node0", argv, {}, "/", str(folder / "log"), str(folder / "log"), "").save(folder / "node0.spec")
    process = subprocess.Popen([sys.executable, "-c", _KEEPER_PROGRAM, str(folder / "node0.spec")], cwd="/")
    wait_until(lambda: child_file.exists() and child_file.read_text().strip().isdigit() and (folder / "node0.state").exists())
    yield process
    process.kill()
    process.wait()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("deleted", ["runs/demo", "runs"])
def test_a_process_whose_folder_was_deleted_is_stopped(deleted: str, tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    shutil.rmtree(tmp_path / deleted)
    assert keeper.wait(timeout=20) == 0
    pid, end = (tmp_path / "child").read_text().split()
    assert end == "stopped"
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_whose_folder_was_replaced_by_another_run_is_stopped(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    shutil.rmtree(tmp_path / "runs/demo")
    (tmp_path / "runs/demo").mkdir()
    assert keeper.wait(timeout=20) == 0
    assert list((tmp_path / "runs/demo").iterdir()) == []


def test_a_process_whose_folder_was_renamed_keeps_running(tmp_path: Path, keeper: subprocess.Popen[bytes]) -> None:
    (tmp_path / "runs/demo").rename(tmp_path / "runs/other")
    time.sleep(10 * _CHECK_SECONDS)
    assert keeper.poll() is None


@pytest.mark.parametrize("case", ["the parent is another folder", "the parent cannot be read", "the parent is on another file system"])
def test_a_folder_that_cannot_be_reached_was_not_deleted(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor of a folder on a network file system that is not mounted any more is stale: only the parents tell."""
    folder = tmp_path / "share/demo"
    folder.mkdir(parents=True)
    monitor = FolderMonitor(folder, check_seconds=0.0)
    os.close(monitor._descriptor)  # stale
    if case == "the parent is on another file system":
        monitor._identity = (monitor._identity[0] + 1, monitor._identity[1])
    shutil.rmtree(tmp_path / "share")
    if case == "the parent is another folder":  # the folder under the mount
        (tmp_path / "share").mkdir()
        (tmp_path / "other").mkdir()
        monitor._parent_identities[tmp_path / "share"] = (0, 0)
    elif case == "the parent cannot be read":
        (tmp_path / "share").symlink_to(tmp_path / "share")  # ELOOP
    assert [monitor.is_deleted() for _ in range(5)] == [False] * 5
