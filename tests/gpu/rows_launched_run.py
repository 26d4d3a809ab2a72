"""A run on this machine, with the commands that a user types: it is deployed, stopped, resumed, killed and removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import Machine, Row

from swarmtrain import process
from swarmtrain.errors import ProcessError

_RUN = "gpu-table"
_SHORT_STEPS, _LONG_STEPS = 40, 1_000_000
_MIN_STEPS_BETWEEN = 20
"""Number of steps that the long run trains before it is stopped, and before it is killed."""
_COMMAND_SECONDS, _POLL_SECONDS = 60.0, 0.5
_DEVICE_LINE = re.compile(r"\| (node0: .*)")


class _Commands:
    """Runs commands of swarmtrain in one folder."""

    def __init__(self, folder: Path, limit: float) -> None:
        """Run commands in `folder`, each of which may take `limit` seconds, and so may the run until it has a status."""
        self._folder, self._limit, self.state_folder = folder, limit, folder / "state"

    def run(self, *arguments: str) -> str:
        """Run `swarmtrain` with `arguments`, and return what it prints. Raises ProcessError if it fails."""
        env = {"XDG_STATE_HOME": str(self.state_folder)}
        argv = [sys.executable, "-m", "swarmtrain", *arguments]
        return process.run_command(argv, cwd=self._folder, env=env, timeout=self._limit)

    def deploy(self, steps: int, *options: str) -> str:
        """Deploy a run of `steps` steps, and return what the command prints."""
        settings = [f"trainer.train_iterations={steps}", f"trainer.save_dir=runs/{steps}", "logger.log_interval=20"]
        overrides = [text for setting in settings for text in ("-o", setting)]
        return self.run("deploy", "config.yml", "--name", _RUN, "--yes", *overrides, *options)

    def read_status(self) -> dict[str, Any]:
        """Return the status of the run."""
        status: dict[str, Any] = json.loads(self.run("status", _RUN, "--json"))
        return status

    def wait_for_status(self, is_reached: Callable[[Mapping[str, Any]], object], description: str) -> dict[str, Any]:
        """Return the first status for which `is_reached` is true. Raises TimeoutError with `description`."""
        deadline = time.monotonic() + self._limit
        while not is_reached(status := self.read_status()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{description}: not within {self._limit:.0f} s\n{self.run('logs', _RUN)[-2000:]}")
            time.sleep(_POLL_SECONDS)
        return status


@pytest.fixture(scope="module")
def commands(machine: Machine) -> Iterator[_Commands]:
    """Commands in a folder with a config. The run is removed at the end."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="st-") as folder:  # the path of a socket in pytest's folder may be too long
        run_commands = _Commands(Path(folder), machine.scale_limit(_COMMAND_SECONDS))
        run_commands.run("init", "config.yml")
        yield run_commands
        with contextlib.suppress(ProcessError):
            run_commands.run("down", _RUN, "--yes")


def test_doctor(row: Row, commands: _Commands) -> None:
    report = json.loads(commands.run("doctor", "config.yml", "--json"))
    findings = [finding for check in report["checks"] for finding in check["findings"]]
    row.values["findings"] = len(findings)
    assert findings == []


def test_deploy(row: Row, machine: Machine, commands: _Commands) -> None:
    start_time = time.time()
    output = commands.deploy(_SHORT_STEPS)
    status = commands.read_status()
    commands.run("down", _RUN, "--yes")
    losses = re.findall(r"validation loss ([0-9.]+) → ([0-9.]+)", output)
    assert losses, output[-2000:]
    initial_loss, final_loss = map(float, losses[-1])
    row.values |= {
        "seconds": time.time() - start_time,
        "seconds_to_world": status["world"]["time"] - start_time,
        "initial_loss": initial_loss,
        "final_loss": final_loss,
        "node": match[1] if (match := _DEVICE_LINE.search(output)) else "",
        "gpu_faults": len(status["gpu_faults"]),
    }
    assert status["state"] == "done", status["reason"]
    assert final_loss < initial_loss
    assert status["gpu_faults"] == []
    if machine.is_cuda:
        assert "nccl" in output, "the ranks do not use the GPU"


def test_stop_and_resume(row: Row, commands: _Commands) -> None:
    commands.deploy(_LONG_STEPS, "--detach")
    commands.wait_for_status(lambda status: _get_step(status) >= _MIN_STEPS_BETWEEN, "the first steps")
    start_time = time.time()
    commands.run("stop", _RUN, "--yes")
    stopped = commands.wait_for_status(lambda status: status["state"] not in ("running", "stopping"), "the stop")
    saved_step = stopped["checkpoint"].get("step", 0)
    assert saved_step > 0
    stop_seconds, start_time = time.time() - start_time, time.time()
    commands.deploy(_LONG_STEPS, "--detach")
    commands.wait_for_status(lambda status: _get_step(status) > saved_step, "steps after the checkpoint")
    row.values |= {"saved_step": saved_step, "stop_seconds": stop_seconds, "resume_seconds": time.time() - start_time}


def test_killed_rank(row: Row, commands: _Commands) -> None:
    """Continues the run of the test before."""
    before = commands.read_status()
    start_time = time.time()
    os.kill(_find_rank_pid(commands.state_folder), signal.SIGKILL)
    commands.wait_for_status(lambda status: status["failures"] > 0, "the report of the killed rank")
    commands.wait_for_status(
        lambda status: status["progress"]["time"] > start_time and len(status["worlds"]) > len(before["worlds"]),
        "steps after the kill",
    )
    row.values |= {"step": _get_step(before), "recovery_seconds": time.time() - start_time}


def _get_step(status: Mapping[str, Any]) -> int:
    return int(status["progress"].get("step", 0))


def _find_rank_pid(state_folder: Path) -> int:
    """Return the pid of rank 0 of the run. Raises LookupError if there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "comm").read_text().strip() == "rank 0" and bytes(state_folder) in (entry / "environ").read_bytes():
                return int(entry.name)
    raise LookupError("no process of rank 0")
