"""A run on this machine, with the commands that a user types: it is deployed, stopped, resumed, killed and removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import swarmtrain
from swarmtrain import process
from swarmtrain.errors import ProcessError
from swarmtrain.trainer.acceptance.rows import Outcome, Row
from swarmtrain.trainer.acceptance.stages import StageContext

_RUN = "acceptance"
_SHORT_STEPS, _LONG_STEPS = 40, 1_000_000
_MIN_STEPS_BETWEEN = 20
"""Number of steps that the long run trains before it is stopped, and before it is killed."""
_COMMAND_SECONDS, _POLL_SECONDS = 60.0, 0.5
_DEVICE_LINE = re.compile(r"\| (node0: .*)")


def run(context: StageContext) -> Iterator[Row]:
    """Yield a row for the whole run, then one each for the checks of doctor, for stopping, resuming and a killed rank."""
    commands = _Commands(Path(context.folder), context.scale_limit(_COMMAND_SECONDS))
    commands.run("init", "config.yml")
    yield _run_doctor(commands, context)
    yield _train_to_the_end(commands, context)
    try:
        yield from _interrupt_run(commands)
    finally:
        with contextlib.suppress(ProcessError):
            commands.run("down", _RUN, "--yes")


def remove_run(environment: Mapping[str, str]) -> None:
    """Remove the run if it is still there, because the process of this stage was killed. `environment`: as of that process."""
    if (Path(environment["XDG_STATE_HOME"]) / "swarmtrain" / _RUN).is_dir():
        argv = [sys.executable, "-m", "swarmtrain", "down", _RUN, "--yes"]
        with contextlib.suppress(ProcessError):
            process.run_command(argv, env=environment, timeout=_COMMAND_SECONDS)


class _Commands:
    """Runs commands of swarmtrain in one folder."""

    def __init__(self, folder: Path, limit: float) -> None:
        """Run commands in `folder`, each of which may take `limit` seconds, and so may the run until it has a status."""
        self._folder, self._limit = folder, limit

    def run(self, *arguments: str) -> str:
        """Run `swarmtrain` with `arguments`, and return what it prints. Raises ProcessError if it fails."""
        env = {"PYTHONPATH": os.pathsep.join([str(Path(swarmtrain.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
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


def _run_doctor(commands: _Commands, context: StageContext) -> Row:
    try:
        report = json.loads(commands.run("doctor", "config.yml", "--json"))
    except ProcessError as error:
        return Row.from_error("doctor", error)
    findings = [finding for check in report["checks"] for finding in check["findings"]]
    return Row.from_check("doctor", not findings, {"findings": len(findings)}, json.dumps(findings))


def _train_to_the_end(commands: _Commands, context: StageContext) -> Row:
    """Deploy a short run, follow it to its end, and return whether its loss falls, on the expected device."""
    start_time = time.time()
    try:
        output = commands.deploy(_SHORT_STEPS)
        status = commands.read_status()
        commands.run("down", _RUN, "--yes")
    except ProcessError as error:
        return Row.from_error("deploy", error)
    device_line = match[1] if (match := _DEVICE_LINE.search(output)) else ""
    losses = re.findall(r"validation loss ([0-9.]+) → ([0-9.]+)", output)
    initial_loss, final_loss = map(float, losses[-1]) if losses else (0.0, 0.0)
    values = {
        "seconds": time.time() - start_time,
        "seconds_to_world": status["world"]["time"] - start_time,
        "initial_loss": initial_loss,
        "final_loss": final_loss,
        "node": device_line,
        "gpu_faults": len(status["gpu_faults"]),
    }
    trained_on_gpu = not context.is_cuda or "nccl" in output
    problems = [
        *([] if status["state"] == "done" else [f"the run is {status['state']}: {status['reason']}"]),
        *([] if final_loss < initial_loss else ["the validation loss does not fall"]),
        *([] if trained_on_gpu else ["the ranks do not use the GPU"]),
        *([f"GPU faults: {status['gpu_faults']}"] if status["gpu_faults"] else []),
    ]
    return Row.from_check("deploy", not problems, values, "; ".join(problems) + "\n" + output[-2000:])


def _interrupt_run(commands: _Commands) -> Iterator[Row]:
    """Stop and resume a long run, then kill its rank."""
    try:
        commands.deploy(_LONG_STEPS, "--detach")
        commands.wait_for_status(lambda status: _get_step(status) >= _MIN_STEPS_BETWEEN, "the first steps")
        start_time = time.time()
        commands.run("stop", _RUN, "--yes")
        stopped = commands.wait_for_status(lambda status: status["state"] not in ("running", "stopping"), "the stop")
        saved_step = stopped["checkpoint"].get("step", 0)
        stop_seconds, start_time = time.time() - start_time, time.time()
        commands.deploy(_LONG_STEPS, "--detach")
        resumed = commands.wait_for_status(lambda status: _get_step(status) > saved_step, "steps after the checkpoint")
        values = {"saved_step": saved_step, "stop_seconds": stop_seconds, "resume_seconds": time.time() - start_time}
        yield Row.from_check("stop and resume", 0 < saved_step < _get_step(resumed), values, "did not resume from the saved step")
        step, start_time = _get_step(resumed), time.time()
        os.kill(_find_rank_pid(), signal.SIGKILL)
        commands.wait_for_status(lambda status: status["failures"] > 0, "the report of the killed rank")
        commands.wait_for_status(
            lambda status: status["progress"]["time"] > start_time and len(status["worlds"]) > len(resumed["worlds"]),
            "steps after the kill",
        )
        yield Row("killed rank", Outcome.passed, {"step": step, "recovery_seconds": time.time() - start_time})
    except (ProcessError, TimeoutError, LookupError) as error:
        yield Row.from_error("stop, resume, kill", error)


def _get_step(status: Mapping[str, Any]) -> int:
    return int(status["progress"].get("step", 0))


def _find_rank_pid() -> int:
    """Return the pid of rank 0 of the run. Raises LookupError if there is none."""
    state_folder = os.environ["XDG_STATE_HOME"].encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (entry / "comm").read_text().strip() == "rank 0" and state_folder in (entry / "environ").read_bytes():
                return int(entry.name)
    raise LookupError("no process of rank 0")
