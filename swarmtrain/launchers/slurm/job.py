"""Slurm's own commands, and what they say of a job."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.errors import EngineError, ProcessError
from swarmtrain.process import run, start

_ANSWERS_WITHIN = 30.0
_POLL = 0.2
_INTERACTIVE = str(0xFFFFFFFA)  # the step that salloc's own shell is, on some clusters
_NO_SUCH_JOB = "Invalid job id"


@dataclass(frozen=True)
class JobState:
    """How a job stands: `state` in Slurm's words (PENDING, RUNNING …), empty if it is in no queue any more."""

    state: str = ""
    reason: str = ""

    @property
    def there(self) -> bool:
        return self.runs or self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STOPPED")

    @property
    def runs(self) -> bool:
        return self.state in ("RUNNING", "SIGNALING", "COMPLETING", "SUSPENDED")


def ask(*argv: str, text: str | None = None) -> str:
    """Return what a command of Slurm prints, which reads `text`. Raises EngineError."""
    try:
        return run(list(argv), input=text, timeout=_ANSWERS_WITHIN)
    except ProcessError as error:
        missing = error.returncode in (126, 127)
        hint = "runner_type: slurm is deployed where sbatch works, on a login node" if missing else f"{error.command} shows it"
        reason = f"{argv[0]} is not here" if missing else error.output.strip().removeprefix(f"{argv[0]}: error: ") or "failed"
        raise EngineError(reason, place="Slurm", hint=hint) from None


def submit(script: Path) -> str:
    """Queue the job and return its number. Raises EngineError."""
    return ask("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def check(script: str) -> None:
    """Ask Slurm whether it would take the job of this script. Raises EngineError with its own words."""
    ask("sbatch", "--test-only", text=script)


def allocation() -> str:
    """Return the number of the job whose nodes this process may use, by salloc or in a batch script, else nothing."""
    step = os.environ.get("SLURM_STEP_ID", _INTERACTIVE)
    return os.environ.get("SLURM_JOB_ID", "") if step == _INTERACTIVE else ""


def step_in_allocation(script: Path, output: Path) -> None:
    """Start the script beside this process: its srun takes the allocation's nodes."""
    with output.open("ab") as out:
        started = start(["bash", str(script)], stdout=out, stderr=out, new_session=True)
    started.returncode = 0  # it is meant to outlive us


def state(job: str) -> JobState:
    """Return how a job stands. Raises EngineError where Slurm does not answer."""
    try:
        line = ask("squeue", "--noheader", "--states=all", "--format=%T|%r", f"--jobs={job}").strip()
    except EngineError as error:
        if _NO_SUCH_JOB in error.message:
            return JobState()
        raise
    word, _, reason = line.partition("|")
    return JobState(word, "" if reason in ("None", "") else reason)


def steps(job: str, name: str) -> list[str]:
    """Return the numbers, as 12.0, of the steps called `name` that a job has at work."""
    try:
        lines = ask("squeue", "--noheader", "--steps", "--format=%i|%j", f"--jobs={job}").split()
    except EngineError as error:
        if _NO_SUCH_JOB in error.message:
            return []
        raise
    return [number for number, _, found in (line.partition("|") for line in lines) if found == name]


def tell(target: str, signal: str | None = None) -> None:
    """Send a signal to the tasks of a job or a step, or cancel it. What has ended by then needs neither."""
    try:
        ask("scancel", *([f"--signal={signal}"] if signal else []), target)
    except EngineError as error:
        if _NO_SUCH_JOB not in error.message and "already completing" not in error.message:
            raise


def gone(job: str, within: float, *, step: str = "") -> bool:
    """Wait until a job has left the queue, or has no step of this name; say whether it did within so many seconds."""
    end = time.monotonic() + within
    while steps(job, step) if step else state(job).there:
        if time.monotonic() > end:
            return False
        time.sleep(_POLL)
    return True
