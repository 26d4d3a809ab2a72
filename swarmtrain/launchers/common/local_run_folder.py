"""Folder of a run in the state directory, `~/.local/state/swarmtrain/RUN` (XDG_STATE_HOME is respected).

The content of the folder is documented in remote.run_folder. Events and logs are in the folder of the run's records
(common.history_store), and are kept when the run is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from swarmtrain.atomic_file import open_private_file
from swarmtrain.config.user_files import describe_os_error
from swarmtrain.errors import StateDirectoryError
from swarmtrain.launchers.base import Launcher, ProgressReporter
from swarmtrain.launchers.common.history_store import RecordedRun, create_run_folder, resolve_state_directory
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.remote.run_folder import LOCK_FILE, HostRunFolder

_LauncherT = TypeVar("_LauncherT")
UNKNOWN_IDENTITY = RunIdentity("unknown")
"""Identity of a run that another version of swarmtrain has deployed."""


def select_dataclass_fields(record_type: type, field_values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `field_values` that are fields of `record_type`: other versions of swarmtrain may write further fields.

    The field `identity` is converted to a RunIdentity, and `code` and `secrets` to tuples.
    """
    values = {item.name: field_values[item.name] for item in fields(record_type) if item.name in field_values}
    values |= {name: tuple(values[name]) for name in ("code", "secrets") if name in values}
    return values | ({"identity": RunIdentity(**select_dataclass_fields(RunIdentity, values["identity"]))} if "identity" in values else {})


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


def translate_os_errors_in_methods(launcher_class: type[_LauncherT]) -> type[_LauncherT]:
    """Class decorator: apply `translate_os_errors` to the methods of the interface Launcher that the class itself defines."""
    for name, method in list(vars(launcher_class).items()):
        if inspect.isfunction(method) and name in vars(Launcher) and not name.startswith("_"):
            setattr(launcher_class, name, translate_os_errors()(method))
    return launcher_class


@contextlib.contextmanager
def hold_run_lock(run: str, report_progress: ProgressReporter) -> Iterator[None]:
    """Hold the exclusive lock for changes to `run`; while another process holds it, report its holder and wait.

    The kernel releases the lock of a process that dies. Raises OSError.
    """
    with open_private_file(create_run_folder(run) / LOCK_FILE, "a+") as lock_file:
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock_file.seek(0)
            report_progress(f"waiting for another swarmtrain command that is changing {run}: process {lock_file.read() or '?'}")
            fcntl.flock(lock_file, fcntl.LOCK_EX)
        lock_file.truncate(0)
        lock_file.write(str(os.getpid()))
        lock_file.flush()
        yield


class LocalRunFolder(HostRunFolder):
    """Folder of one run in the state directory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._identity: RunIdentity | None = None

    @property
    def recorded_run(self) -> RecordedRun:
        """The records of the run. Those of a run that does not exist have UNKNOWN_IDENTITY, and are empty. Raises OSError."""
        if self._identity is None and (marker := self.load_marker()) is not None:
            self._identity = RunIdentity(**select_dataclass_fields(RunIdentity, marker.get("identity", {"id": UNKNOWN_IDENTITY.id})))
        return RecordedRun(self.path.name, self._identity or UNKNOWN_IDENTITY)

    @property
    def records_path(self) -> Path:
        return self.recorded_run.folder

    def _delete_records(self) -> None:
        """Keep the events and logs, which are not in this folder."""
