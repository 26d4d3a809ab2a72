"""A process keeper keeps its process running while its own files cannot be written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from swarmtrain.remote.process_spec import ProcessSpec

_CHILD_PROGRAM = "echo started >> child; until [ -e go ]; do sleep 0.05; done"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_survives_a_state_file_that_cannot_be_written(tmp_path: Path) -> None:
    state_path = tmp_path / "node0.state"
    state_path.mkdir()  # no file can replace a folder: the write fails, as on a full disk
    log = str(tmp_path / "log")
    ProcessSpec("node0", ["sh", "-c", _CHILD_PROGRAM], {}, str(tmp_path), log, log, "").save(tmp_path / "node0.spec")
    keeper = subprocess.Popen([sys.executable, "-m", "swarmtrain.remote.process_keeper", str(tmp_path / "node0.spec")])
    try:
        wait_until((tmp_path / "child").exists)
        time.sleep(0.3)
        assert keeper.poll() is None
        state_path.rmdir()
        wait_until(state_path.is_file)
        assert json.loads(state_path.read_text())["state"] == "running"
        (tmp_path / "go").touch()
        assert keeper.wait(timeout=20) == 0
        assert json.loads(state_path.read_text())["state"] == "complete"
        assert (tmp_path / "child").read_text() == "started\n"
    finally:
        keeper.kill()
        keeper.wait()
