"""Folder of a run on a machine that runs its processes, and the process keepers of these processes.

local.json          marker of a run, with the record that a later launcher process reads; removed last
deployed.json       the config as deployed             config.json   the resolved config, which the nodes read
code/ secrets/      files shipped with the run         logs/         files that ranks write
NODE.spec NODE.state  spec and state of a process under a process keeper   lock   held by the process that changes the run
events.jsonl        the coordinator's lines            NODE.log      output of a node, each line with a timestamp
events.N.jsonl NODE.N.log   events and logs of earlier starts of the run
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swarmtrain.atomic_file import SECRET_MODE, open_private_file, write_text_atomically
from swarmtrain.process import defer_signals, start_process
from swarmtrain.remote.process_spec import ProcessSpec, ProcessState

MARKER_FILE, LOCK_FILE, EVENTS_FILE = "local.json", "lock", "events.jsonl"
_KILL_TIMEOUT_SECONDS = 5.0
_EXIT_GRACE_SECONDS = 3.0
_CLEANUP_TIMEOUT_SECONDS = 60.0
_PREPARE_TIMEOUT_SECONDS = 30.0
_POLL_SECONDS = 0.05
_KEEPER_START_TIMEOUT_SECONDS = 5.0
# In the zip file that is sent over SSH, the keeper is the main program.
_KEEPER_ARGV = [archive] if (archive := getattr(globals()["__loader__"], "archive", "")) else ["-m", "swarmtrain.remote.process_keeper"]


class HostRunFolder:
    """Folder of one run on the machine that runs its processes."""

    marker_file = MARKER_FILE

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def records_path(self) -> Path:
        """Folder of the run's events and logs."""
        return self.path

    @property
    def events_path(self) -> Path:
        return self.records_path / EVENTS_FILE

    @property
    def exists(self) -> bool:
        return (self.path / self.marker_file).exists()

    def load_marker(self) -> dict[str, Any] | None:
        """Return the content of the run's marker file; None if the run does not exist."""
        try:
            return dict(json.loads((self.path / self.marker_file).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def get_log_path(self, process_name: str) -> Path:
        """Return the path of the log file of the process `process_name`."""
        return self.records_path / f"{process_name}.log"

    def rotate_events(self) -> None:
        """Move events and logs to numbered files, for a new coordinator.

        Otherwise readers would stop at the old outcome, and attribute old lines to the new start of the run.
        """
        if not self.events_path.exists():
            return
        number = 1 + len(list(self.records_path.glob("events.*.jsonl")))
        self.events_path.rename(self.records_path / f"events.{number}.jsonl")
        for log in self.records_path.glob("node*.log"):
            if log.stem.isalnum():  # not rotated already
                log.rename(self.records_path / f"{log.stem}.{number}.log")

    def list_process_names(self) -> list[str]:
        """Return the names of all process keepers, running or not: nodes in order, then the rendezvous."""
        names = [path.stem for path in self.path.glob("*.spec")]
        return sorted(names, key=lambda name: (not name.startswith("node"), len(name), name))

    def load_process_spec(self, name: str) -> ProcessSpec | None:
        """Return the spec of the process `name`; None if it does not exist."""
        try:
            return ProcessSpec.load(self.path / f"{name}.spec")
        except (OSError, ValueError, TypeError):
            return None

    def load_process_state(self, name: str) -> ProcessState | None:
        """Return the state of the process `name`; None if it does not exist.

        A process keeper that died without a stop request counts as failed.
        """
        try:
            state = ProcessState(**json.loads((self.path / f"{name}.state").read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        if state.state in ("running", "failed") and not self._is_keeper_process(state.keeper_pid, name):
            return ProcessState(state.keeper_pid, "failed", state.exit_code, state.restarts)
        return state

    def describe_process_state(self, name: str) -> dict[str, Any] | None:
        """Return the state of the process `name` for a launcher: `state`, `exit_code`, and further fields; None if it does not exist."""
        state = self.load_process_state(name)
        return asdict(state) if state else None

    def is_process_alive(self, name: str) -> bool:
        """Return whether the process keeper of `name` is running."""
        state = self.load_process_state(name)
        return state is not None and self._is_keeper_process(state.keeper_pid, name)

    def start_process_keeper(self, spec: ProcessSpec) -> None:
        """Start a process keeper for `spec`. Raises ProcessError if it cannot be started."""
        path = self.path / f"{spec.name}.spec"
        spec.save(path)
        path.with_suffix(".state").unlink(missing_ok=True)
        argv = [sys.executable, *_KEEPER_ARGV, str(path)]
        with open_private_file(self.get_log_path(spec.name), "ab") as log, defer_signals():
            keeper = start_process(argv, cwd=spec.cwd, stdout=log, stderr=log, new_session=True)
            write_text_atomically(path.with_suffix(".state"), json.dumps(asdict(ProcessState(keeper.pid, "running"))), mode=SECRET_MODE)
            # A process that was just started has no command line for a moment, and a concurrent stop identifies it by its command line.
            deadline = time.monotonic() + _KEEPER_START_TIMEOUT_SECONDS
            while keeper.poll() is None and not self._is_keeper_process(keeper.pid, spec.name) and time.monotonic() < deadline:
                time.sleep(0.001)
        keeper.returncode = 0  # suppress Popen's warning: the keeper outlives this process; its state file reports how it ends

    def stop_processes(self, names: list[str], grace: float) -> None:
        """Stop the process keepers of `names` and all their descendants: SIGTERM, then SIGKILL after `grace` + 3 s.

        If `grace` is 0, SIGKILL follows at once, or, if a process has a cleanup command, after this command and at most 30 s.
        """
        keepers = {
            name: state.keeper_pid
            for name in names
            if (state := self.load_process_state(name)) and self._is_keeper_process(state.keeper_pid, name)
        }
        for pid in keepers.values():
            _send_signal(pid, signal.SIGTERM)
        specs_with_cleanup = [spec for name in names if (spec := self.load_process_spec(name)) and spec.cleanup_command]
        if specs_with_cleanup and not grace:
            for spec in specs_with_cleanup:
                run_cleanup_command(spec)
        # A process keeper that is creating a container completes the creation first. Otherwise the container would be orphaned.
        self._wait_for_keepers_to_exit(
            keepers, grace + _EXIT_GRACE_SECONDS if grace else _PREPARE_TIMEOUT_SECONDS if specs_with_cleanup else 0.0
        )
        remaining = {name: pid for name, pid in keepers.items() if self._is_keeper_process(pid, name)}
        process_trees = [pid for keeper in remaining.values() for pid in [keeper, *_list_descendant_processes(keeper)]]
        # A process keeper that died while starting may have left child processes that have not exited yet.
        for pid in {*process_trees, *_list_session_processes(keepers.values())}:
            _send_signal(pid, signal.SIGKILL)
        self._wait_for_keepers_to_exit(remaining, _KILL_TIMEOUT_SECONDS)
        deadline = time.monotonic() + _KILL_TIMEOUT_SECONDS
        while _list_session_processes(keepers.values()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        for spec in specs_with_cleanup:
            run_cleanup_command(spec)

    def delete_process_files(self, name: str) -> None:
        """Delete the files of the process keeper of `name`; its log is kept."""
        for suffix in (".spec", ".state"):
            (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def remove_other_code_files(self, names: Collection[str]) -> None:
        """Remove the code files of an earlier deployment that are not among `names`, since the ranks could still import them."""
        code_folder = self.path / "code"
        for path in code_folder.rglob("*"):
            if str(path.relative_to(code_folder)) not in names and not path.is_dir():
                path.unlink(missing_ok=True)

    def remove_run(self) -> None:
        """Remove the run, and its events and logs if they are in its folder.

        The marker file is removed last: until then the run can be found, and the removal repeated.
        """
        for name in ("code", "secrets"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        half_written = self.path.glob(".*")
        for path in (self.path / "deployed.json", self.path / "config.json", *half_written):
            path.unlink(missing_ok=True)
        for name in self.list_process_names():
            self.delete_process_files(name)
        (self.path / self.marker_file).unlink(missing_ok=True)
        self._delete_records()

    def _delete_records(self) -> None:
        """Delete the folder with the events and logs, and its parent if it is then empty.

        The lock is deleted, too: its holder is the last user of the folder.
        """
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    def _wait_for_keepers_to_exit(self, keepers: dict[str, int], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and any(self._is_keeper_process(pid, name) for name, pid in keepers.items()):
            time.sleep(_POLL_SECONDS)

    def _is_keeper_process(self, pid: int, process_name: str) -> bool:
        """Return whether the process `pid` is the process keeper of `process_name`.

        The pid alone does not identify the keeper, since Linux reuses pids.
        """
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                return False
            return str(self.path / f"{process_name}.spec").encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False


def run_cleanup_command(spec: ProcessSpec) -> None:
    """Run the cleanup command of `spec`, which removes what the process may leave behind, such as a container. Errors are ignored."""
    if not spec.cleanup_command:
        return
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run(spec.cleanup_command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_CLEANUP_TIMEOUT_SECONDS, check=False)


def _list_session_processes(leaders: Collection[int]) -> list[int]:
    """Return the pids of live processes in the sessions of `leaders`. Each process keeper has its own session, with its descendants."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            pids += [int(entry.name)] if int(session) in leaders and state != "Z" else []
    return pids


def _list_descendant_processes(pid: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    children = [child for child, parent in parents.items() if parent == pid]
    return [descendant for child in children for descendant in [child, *_list_descendant_processes(child)]]


def _send_signal(pid: int, signal_number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal_number)
