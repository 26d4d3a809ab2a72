"""Slurm's command-line tools (sbatch, squeue, scancel …), and the job states that they report."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.atomic_file import open_private_file
from swarmtrain.errors import EngineError, ProcessError
from swarmtrain.process import run_command, start_process

_COMMAND_TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.2
_INTERACTIVE_STEP_ID = str(0xFFFFFFFA)  # the step in which salloc runs its shell, on some clusters
_NO_SUCH_JOB_MESSAGE = "Invalid job id"


@dataclass(frozen=True)
class JobState:
    """State of a Slurm job: `state` in Slurm's terms (PENDING, RUNNING …), empty if the job is no longer in the queue."""

    state: str = ""
    reason: str = ""

    @property
    def is_active(self) -> bool:
        return self.is_running or self.state in ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "STOPPED")

    @property
    def is_running(self) -> bool:
        return self.state in ("RUNNING", "SIGNALING", "COMPLETING", "SUSPENDED")


def run_slurm_command(*argv: str, stdin: str | None = None) -> str:
    """Run a Slurm command with `stdin` as its input, and return its output. Raises EngineError if it fails."""
    try:
        return run_command(list(argv), input=stdin, timeout=_COMMAND_TIMEOUT_SECONDS)
    except ProcessError as error:
        missing = error.returncode in (126, 127)
        hint = (
            "run this command on a machine that has sbatch, for example a login node"
            if missing
            else f"to see the error, run: {error.command}"
        )
        reason = (
            f"{argv[0]} is not available on this machine"
            if missing
            else error.output.strip().removeprefix(f"{argv[0]}: error: ") or "failed"
        )
        raise EngineError(reason, place="Slurm", hint=hint) from None


def submit_job(script_path: Path) -> str:
    """Submit the sbatch script and return the job id. Raises EngineError with Slurm's reason if the script is refused."""
    return run_slurm_command("sbatch", "--parsable", str(script_path)).strip().partition(";")[0]


def check_sbatch_script(script: str) -> None:
    """Check that Slurm would accept the sbatch script (`sbatch --test-only`). Raises EngineError with Slurm's reason if not."""
    run_slurm_command("sbatch", "--test-only", stdin=script)


def build_step_argv(job_id: str, host: str, *, with_terminal: bool) -> list[str]:
    """Return the command prefix that runs a command on `host` as an additional step of job `job_id`, whose resources it shares."""
    return [
        "srun",
        f"--jobid={job_id}",
        "--overlap",
        f"--nodelist={host}",
        "--nodes=1",
        "--ntasks=1",
        *(["--pty"] if with_terminal else []),
    ]


def find_allocation_id() -> str:
    """Return the id of the job in whose allocation this process runs (salloc or a batch script); empty outside an allocation."""
    step = os.environ.get("SLURM_STEP_ID", _INTERACTIVE_STEP_ID)
    return os.environ.get("SLURM_JOB_ID", "") if step == _INTERACTIVE_STEP_ID else ""


def start_script_in_allocation(script_path: Path, output_path: Path) -> None:
    """Start the sbatch script in the background inside an allocation, whose nodes its srun uses. Append its output to `output_path`."""
    with open_private_file(output_path, "ab") as log_file:
        process = start_process(["bash", str(script_path)], stdout=log_file, stderr=log_file, new_session=True)
    process.returncode = 0  # the script must outlive this process


def read_job_state(job_id: str) -> JobState:
    """Return the state of the job `job_id`. Raises EngineError if Slurm does not answer."""
    try:
        line = run_slurm_command("squeue", "--noheader", "--states=all", "--format=%T|%r", f"--jobs={job_id}").strip()
    except EngineError as error:
        if _NO_SUCH_JOB_MESSAGE in error.message:
            return JobState()
        raise
    state_name, _, reason = line.partition("|")
    return JobState(state_name, "" if reason in ("None", "") else reason)


def list_job_steps(job_id: str, name: str) -> list[str]:
    """Return the ids (such as 12.0) of the running steps of job `job_id` named `name`."""
    try:
        lines = run_slurm_command("squeue", "--noheader", "--steps", "--format=%i|%j", f"--jobs={job_id}").split()
    except EngineError as error:
        if _NO_SUCH_JOB_MESSAGE in error.message:
            return []
        raise
    return [step_id for step_id, _, step_name in (line.partition("|") for line in lines) if step_name == name]


def signal_or_cancel_job(job_or_step_id: str, signal: str | None = None) -> None:
    """Send a signal to all tasks of a job or job step, or cancel it. A target that has already ended is not an error."""
    try:
        run_slurm_command("scancel", *([f"--signal={signal}"] if signal else []), job_or_step_id)
    except EngineError as error:
        if _NO_SUCH_JOB_MESSAGE not in error.message and "already completing" not in error.message:
            raise


def wait_until_job_gone(job_id: str, timeout: float, *, step_name: str = "") -> bool:
    """Wait until the job has left the queue, or has no step named `step_name`. Return False if that takes more than `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while list_job_steps(job_id, step_name) if step_name else read_job_state(job_id).is_active:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
