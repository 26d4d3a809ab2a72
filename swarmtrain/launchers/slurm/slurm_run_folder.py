"""Folder of one Slurm run, in the home directory that all nodes share: `~/.local/state/swarmtrain/RUN` (XDG_STATE_HOME is respected).

slurm.json          record of the run: its job, its files; removed last
files-DIGEST/       files with which a job was submitted: job.sh, deployed.json, config.json, code/, secrets/
NODE.state          state of a node, from its process keeper    logs/       the ranks' own files
slurm.out           output of Slurm and the batch script        lock        held by the process that changes the run

Events and logs are in the folder of the run's records (launchers.common.history_store).
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass
from dataclasses import replace as changed
from functools import cache
from pathlib import Path
from typing import Any

from swarmtrain.atomic_file import PUBLIC_MODE, SECRET_MODE, create_private_folder, write_files_atomically, write_text_atomically
from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.errors import EngineError, HostError, RunNotFound
from swarmtrain.launchers.common.history_store import RecordedRun, resolve_state_directory
from swarmtrain.launchers.common.local_run_folder import UNKNOWN_IDENTITY, LocalRunFolder, select_dataclass_fields
from swarmtrain.launchers.slurm import slurm_cli
from swarmtrain.launchers.ssh.host_connections import StateDirectoryHost
from swarmtrain.planning.plan import Plan
from swarmtrain.protocol import EVENT_OUTCOME, RENDEZVOUS_SERVICE, RUN_KEY_NAME, Event
from swarmtrain.protocol.run_identity import RunIdentity, create_run_identity
from swarmtrain.protocol.run_key import create_run_key

_RECORD_FILE = "slurm.json"
_SUBMITTED_RECORD_FILE = "run.json"
_QUERY_SECONDS = 2.0
SCRIPT_FILE = "job.sh"


@dataclass(frozen=True)
class JobAttempt:
    """One attempt of a Slurm job. A requeued job keeps its id, so the id alone does not identify the attempt."""

    job: str
    step: str
    restarts: int


@dataclass(frozen=True)
class NodeState:
    """Last reported state of a node, in Swarm's terms: running, complete, failed (and about to be restarted), shutdown."""

    host: str
    state: str
    attempt: JobAttempt
    exit_code: int | None = None
    restarts: int = 0


@dataclass(frozen=True)
class SlurmRunRecord:
    """Record of a Slurm run: the data that a later process needs."""

    files: str
    """Name of the folder with the job's files."""
    code: tuple[str, ...]
    secrets: tuple[str, ...]
    nodes: int
    stop_grace: float
    cwd: str
    job: str = ""
    """The job's id; empty until Slurm has assigned one."""
    allocation: bool = False
    """Whether the job is an allocation of the user (salloc), and the run is only a step of this job."""
    identity: RunIdentity = UNKNOWN_IDENTITY

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def load(cls, path: Path) -> SlurmRunRecord | None:
        """Return the record in the file at `path`; None if there is no such file."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(**select_dataclass_fields(cls, data))


def is_job_active(record: SlurmRunRecord, run: str) -> bool:
    """Return whether the run's job is pending or running. Raises EngineError."""
    if not record.job:
        return False
    return bool(slurm_cli.list_job_steps(record.job, run)) if record.allocation else slurm_cli.read_job_state(record.job).is_active


class SlurmHost(StateDirectoryHost):
    """This machine as a host with the folders of the Slurm runs, which the machines of the cluster share."""

    def __init__(self) -> None:
        super().__init__(cache(SlurmRunFolder))

    def call_agent(self, method: str, **fields: Any) -> Any:
        """Call `method` of the agent in this process and return the result. Raises HostError if Slurm does not answer."""
        try:
            return super().call_agent(method, **fields)
        except EngineError as error:
            raise HostError(error.message, place=error.place, hint=error.hint) from None


class SlurmRunFolder(LocalRunFolder):
    """Read and write the files in the folder of one Slurm run."""

    marker_file = _RECORD_FILE

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.run = path.name
        self._record: SlurmRunRecord | None = None
        self._processes: tuple[bool, dict[str, dict[str, Any]]] = (False, {})
        self._queried_at = float("-inf")

    @property
    def key_path(self) -> Path:
        return self.path / RUN_KEY_NAME

    def list_process_names(self) -> list[str]:
        record = self.find_record()
        if record != self._record:
            self._record, self._queried_at = record, float("-inf")
        return [*(f"node{index}" for index in range(record.nodes)), RENDEZVOUS_SERVICE] if record else []

    def is_process_alive(self, name: str) -> bool:
        """Return whether the run's job is pending or running, for any process `name`. Raises EngineError."""
        return self._query_processes()[0]

    def describe_process_state(self, name: str) -> dict[str, Any] | None:
        """Return `host`, `state` (in Swarm's terms), `reason` and `exit_code` of the process `name`. Raises EngineError."""
        return self._query_processes()[1].get(name)

    def _query_processes(self) -> tuple[bool, dict[str, dict[str, Any]]]:
        """Return whether the job is pending or running, and the state of each process, by the last record that was read.

        Slurm and the nodes' files are read at most every 2 s. Raises EngineError.
        """
        record = self._record
        if record is not None and time.monotonic() > self._queried_at + _QUERY_SECONDS:
            job_state = slurm_cli.read_job_state(record.job) if record.job else slurm_cli.JobState()
            is_active = is_job_active(record, self.run) if record.allocation else job_state.is_active
            states = {name: self._describe_process(record, name, job_state, is_active=is_active) for name in self.list_process_names()}
            self._processes, self._queried_at = (is_active, states), time.monotonic()
        return self._processes

    def _describe_process(self, record: SlurmRunRecord, name: str, job_state: slurm_cli.JobState, *, is_active: bool) -> dict[str, Any]:
        node_state = read_node_state(self.path, name)
        host, exit_code, reason = "", None, ""
        if is_active and not record.allocation and not job_state.is_running:
            state, reason = "pending", f"job {record.job}: {job_state.reason}" if job_state.reason else f"job {record.job}"
        elif node_state is None or node_state.attempt.job != record.job:
            state, reason = ("starting", "") if is_active else ("shutdown", job_state.state.lower())
        else:
            host, state, exit_code = node_state.host, node_state.state, node_state.exit_code
            if not is_active and state in ("running", "failed"):
                state, reason = "shutdown", f"job {record.job}: {job_state.state.lower() or 'has ended'}"
            elif exit_code:
                reason = f"exit code {exit_code}"
        return {"host": host, "state": state, "reason": reason, "exit_code": exit_code}

    def find_record(self) -> SlurmRunRecord | None:
        """Return the run's record; None if it does not exist."""
        return SlurmRunRecord.load(self.path / _RECORD_FILE)

    def read_job_record(self) -> SlurmRunRecord:
        """Return the run's record. Raises RunNotFound if it does not exist."""
        if (record := self.find_record()) is None:
            known_runs = ", ".join(list_slurm_runs()) or "none"
            raise RunNotFound(f"unknown Slurm run; existing runs: {known_runs}", place=f"run {self.run}")
        return record

    def write_job_files(self, plan: Plan, record: SlurmRunRecord, script: str) -> Path:
        """Write the files with which a job is submitted, and return the path of its script. Raises OSError if they cannot be written."""
        files = self.path / record.files
        create_private_folder(self.path)
        create_private_folder(files / "secrets")
        (self.path / "logs").mkdir(exist_ok=True)
        texts = {"deployed.json": plan.config.to_json(), "config.json": plan.config.to_node_config().to_json()}
        texts |= {SCRIPT_FILE: script, _SUBMITTED_RECORD_FILE: record.to_json()}
        write_files_atomically(
            ({} if self.key_path.exists() else {self.key_path: (create_run_key(), SECRET_MODE)})
            | {files / "secrets" / item.name: (item.content, SECRET_MODE) for item in plan.cargo.secrets}
            | {files / "code" / item.name: (item.content, PUBLIC_MODE) for item in plan.cargo.code}
            # The configs and the script contain the values of runner.env.
            | {files / name: (text.encode(), SECRET_MODE) for name, text in texts.items()}
        )
        return files / SCRIPT_FILE

    def write_record(self, record: SlurmRunRecord) -> None:
        """Write the record, by which later processes find the run. Raises OSError if it cannot be written."""
        RecordedRun(self.run, record.identity).create_folder()
        write_text_atomically(self.path / _RECORD_FILE, record.to_json(), mode=SECRET_MODE)

    def load_deployment(self) -> tuple[Config, Cargo]:
        record = self.read_job_record()
        files = self.path / record.files
        code = tuple(RunFile.from_content(name, (files / "code" / name).read_bytes()) for name in record.code)
        secrets = tuple(RunFile.from_content(name, (files / "secrets" / name).read_bytes()) for name in record.secrets)
        return Config.from_json((files / "deployed.json").read_text(encoding="utf-8")), Cargo(code, secrets)

    def remove_job_files(self, *, kept_folder: str = "") -> None:
        """Remove the files that jobs were submitted with, including secrets, except the folder `kept_folder`."""
        for files in self.path.glob("files-*"):
            if files.name != kept_folder:
                shutil.rmtree(files, ignore_errors=True)

    def remove_run(self) -> None:
        """Remove the run; its events and logs are kept.

        The record is removed last: until then the run can be found, and an interrupted removal can be repeated.
        """
        self.remove_job_files()
        for state in self.path.glob("*.state"):
            state.unlink(missing_ok=True)
        self.key_path.unlink(missing_ok=True)
        (self.path / _RECORD_FILE).unlink(missing_ok=True)


def list_slurm_runs() -> list[str]:
    """Return the names of all runs under Slurm, sorted. Raises OSError."""
    try:
        return sorted(path.name for path in resolve_state_directory().iterdir() if SlurmRunFolder(path).exists)
    except FileNotFoundError:
        return []


def record_job_id(job_folder: SlurmRunFolder, files_folder: str, job_id: str) -> None:
    """Record `job_id` as the run's job, with the other fields of the record in `files_folder`.

    Needed if the user called sbatch: then the run has no record, or one without this job's id. A run without a record gets a new identity.
    """
    record = job_folder.find_record()
    if (record is None or record.job != job_id) and (
        submitted_record := SlurmRunRecord.load(job_folder.path / files_folder / _SUBMITTED_RECORD_FILE)
    ) is not None:
        identity = record.identity if record else create_run_identity()
        job_folder.write_record(changed(submitted_record, job=job_id, identity=identity))


def read_node_state(run_folder: Path, name: str) -> NodeState | None:
    """Return the state that the process `name` last reported; None before its first report."""
    try:
        data = json.loads((run_folder / f"{name}.state").read_text(encoding="utf-8"))
        return NodeState(**{**data, "attempt": JobAttempt(**data["attempt"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_outcome_exit_code(events_file: Path, *, default: int) -> int:
    """Return the exit code for the last outcome in `events_file`; `default` if there is no outcome."""
    with events_file.open(encoding="utf-8", errors="replace") as lines:
        outcomes = [event for line in lines if (event := Event.from_line(line)) and event.kind == EVENT_OUTCOME]
    return int(outcomes[-1].data.get("exit_code") or 0) if outcomes else default
