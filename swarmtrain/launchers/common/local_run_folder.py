"""Folder of a local run, `~/.local/state/swarmtrain/RUN` (XDG_STATE_HOME is respected); its content is documented in remote.run_folder.

Its events and logs are in the folder of its records (common.history_store), and are kept when the run is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from swarmtrain.atomic_file import PUBLIC_MODE, SECRET_MODE, create_private_folder, open_private_file
from swarmtrain.cargo import Cargo, RunFile
from swarmtrain.config import Config
from swarmtrain.config.user_files import describe_os_error, write_files_atomically
from swarmtrain.errors import RunNotFound, StackError, StateDirectoryError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.history_store import RecordedRun, create_run_folder, resolve_state_directory
from swarmtrain.plan import Plan
from swarmtrain.protocol import PROTOCOL_VERSION, RUN_KEY_NAME
from swarmtrain.remote.run_folder import LOCK_FILE, MARKER_FILE, HostRunFolder
from swarmtrain.run_identity import RunIdentity
from swarmtrain.run_key import create_run_key


@contextlib.contextmanager
def translate_os_errors() -> Iterator[None]:
    """Convert an OSError (except BrokenPipeError) that the body raises to a StateDirectoryError. Used to access run folders."""
    try:
        yield
    except BrokenPipeError:  # stdout was closed
        raise
    except OSError as error:
        hint = "store the runs in another folder with: export XDG_STATE_HOME=FOLDER"
        raise StateDirectoryError(describe_os_error(error), place=str(error.filename or resolve_state_directory()), hint=hint) from None


def list_local_runs() -> list[str]:
    """Return the names of all local runs, sorted.

    Raises OSError if a folder cannot be read; a glob would skip such a folder.
    """
    try:
        return sorted(path.name for path in resolve_state_directory().iterdir() if LocalRunFolder(path.name).exists)
    except FileNotFoundError:
        return []


def select_dataclass_fields(record_type: type, field_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `field_values` that are fields of `record_type`: other versions of swarmtrain may write further fields.

    The field `identity` is converted to a RunIdentity.
    """
    values = {item.name: field_values[item.name] for item in fields(record_type) if item.name in field_values}
    return values | ({"identity": RunIdentity(**values["identity"])} if "identity" in values else {})


def build_version_error(run: str, next_step: str) -> StackError:
    """Return the error for a run whose record was written by another version of swarmtrain."""
    hint = f"remove the run with swarmtrain down {run}, then {next_step}"
    return StackError("its record was written by another version of swarmtrain", place=f"run {run}", hint=hint)


UNKNOWN_IDENTITY = RunIdentity("unknown")
"""Identity of a run that another version of swarmtrain has deployed."""


@dataclass(frozen=True)
class LocalRunRecord:
    """Record of a local run: the data that a later launcher process needs.

    The defaults are for records of another version of swarmtrain, whose runs can be listed, stopped and removed.
    """

    protocol: int = 0
    """Version of the protocol of the run's processes."""
    identity: RunIdentity = UNKNOWN_IDENTITY
    coordinator_port: int = 0
    cwd: str = ""
    stop_grace: float = 90.0
    hosts: dict[str, str] = field(default_factory=dict)
    code: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)


class LocalRunFolder(HostRunFolder):
    """Folder of one local run, and the process keepers recorded in it."""

    def __init__(self, run: str) -> None:
        super().__init__(resolve_state_directory() / run)
        self.run = run
        self.identity: RunIdentity | None = None
        """Identity of the run; None until it is read from the run's record, or set for a run that is being brought up."""

    @property
    def recorded_run(self) -> RecordedRun:
        """The records of the run. Raises RunNotFound if the run does not exist."""
        self.identity = self.identity or self.read_identity()
        return RecordedRun(self.run, self.identity)

    @property
    def records_path(self) -> Path:
        return self.recorded_run.folder

    def read_identity(self) -> RunIdentity:
        """Return the identity of the run. Raises RunNotFound if the run does not exist."""
        return self.read_record().identity

    @contextlib.contextmanager
    def hold_lock(self, report_progress: ProgressReporter) -> Iterator[None]:
        """Hold the exclusive lock for changes to the run; while another process holds it, report its holder and wait.

        The kernel releases the lock of a process that dies.
        """
        create_run_folder(self.run)
        with open_private_file(self.path / LOCK_FILE, "a+") as lock_file:
            try:
                fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock_file.seek(0)
                report_progress(f"waiting for another swarmtrain command that is changing {self.run}: process {lock_file.read() or '?'}")
                fcntl.flock(lock_file, fcntl.LOCK_EX)
            lock_file.truncate(0)
            lock_file.write(str(os.getpid()))
            lock_file.flush()
            yield

    def read_record(self) -> LocalRunRecord:
        """Return the run's record, without fields that this version of swarmtrain does not know. Raises RunNotFound."""
        try:
            values = json.loads((self.path / MARKER_FILE).read_text(encoding="utf-8"))
            return LocalRunRecord(**select_dataclass_fields(LocalRunRecord, values))
        except FileNotFoundError:
            known_runs = ", ".join(list_local_runs()) or "none"
            raise RunNotFound(f"unknown run on this machine; existing runs: {known_runs}", place=f"run {self.run}") from None

    def read_compatible_record(self) -> LocalRunRecord:
        """Return the run's record. Raises RunNotFound; StackError if the run's processes use another version of the protocol."""
        record = self.read_record()
        if record.protocol != PROTOCOL_VERSION:
            raise build_version_error(self.run, "deploy again")
        return record

    def save_deployment(self, plan: Plan, record: LocalRunRecord) -> None:
        """Write all files of the run's deployment, or none. Raises OSError if they cannot be written."""
        key_path = self.path / "secrets" / RUN_KEY_NAME
        create_private_folder(key_path.parent)
        (self.path / "logs").mkdir(exist_ok=True)
        self.identity = record.identity
        self.recorded_run.create_folder()
        config, resolved, record_json = plan.config.to_json(), plan.config.to_node_config().to_json(), json.dumps(asdict(record), indent=1)
        write_files_atomically(
            {self.path / "secrets" / item.name: (item.content, SECRET_MODE) for item in plan.cargo.secrets}
            | {self.path / "code" / item.name: (item.content, PUBLIC_MODE) for item in plan.cargo.code}
            # The configs contain the values of runner.env.
            | {self.path / name: (text.encode(), SECRET_MODE) for name, text in (("deployed.json", config), ("config.json", resolved))}
            | ({} if key_path.exists() else {key_path: (create_run_key(), SECRET_MODE)})
            | {self.path / MARKER_FILE: (record_json.encode(), SECRET_MODE)}
        )
        self.remove_other_code_files({item.name for item in plan.cargo.code})

    def load_deployment(self) -> tuple[Config, Cargo]:
        """Return the config and cargo that `save_deployment` stored. Raises RunNotFound if the run does not exist."""
        record = self.read_compatible_record()
        code = tuple(RunFile.from_content(name, (self.path / "code" / name).read_bytes()) for name in record.code)
        secrets = tuple(RunFile.from_content(name, (self.path / "secrets" / name).read_bytes()) for name in record.secrets)
        return Config.from_json((self.path / "deployed.json").read_text(encoding="utf-8")), Cargo(code, secrets)
