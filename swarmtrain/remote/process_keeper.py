"""Process keeper: restarts one process of a run, as Swarm's `restart_policy: on-failure` does: after any exit code except 0.

The launcher starts `python -m swarmtrain.remote.process_keeper SPEC` in its own session. SIGTERM is forwarded to the process, which is
then not restarted. The state is written to a sidecar file of SPEC with the suffix .state. If the folder of SPEC is deleted, no command can
find the process any more: the keeper then stops it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from swarmtrain.atomic_file import SECRET_MODE, open_private_file, write_text_atomically
from swarmtrain.process import start_process
from swarmtrain.remote.folder_monitor import CHECK_SECONDS, FolderMonitor
from swarmtrain.remote.process_spec import ProcessSpec, ProcessState
from swarmtrain.remote.run_folder import run_cleanup_command
from swarmtrain.remote.timestamped_log import open_timestamped_log

_RESTART_DELAY_SECONDS = 1.0
_POLL_SECONDS = 0.1
_COORDINATOR_DELAY_SECONDS = 60.0
"""Seconds for which a coordinator whose folder was deleted keeps running, for nodes that save before they exit."""
_KILL_SECONDS = 120.0
"""Seconds after which a process whose folder was deleted is killed."""


class ProcessKeeper:
    """Process keeper: restarts one process until it exits with 0 or a stop is requested."""

    def __init__(self, spec_path: Path, check_seconds: float = CHECK_SECONDS) -> None:
        self.spec_path = spec_path
        self.spec = ProcessSpec.load(spec_path)
        self.state_path = spec_path.with_suffix(".state")
        self.stop_requested = False
        self.restarts = 0
        self.pending_state: ProcessState | None = None
        self.folder_monitor = FolderMonitor(spec_path.parent, check_seconds)
        self.is_folder_deleted = False

    def run_process_with_restarts(self) -> int:
        """Run the process, and restart it until it exits with 0 or a stop is requested. Return exit code 0."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle_stop_signal)
        while not self.stop_requested and self.spec_path.exists():  # the run may be removed while this keeper starts
            code = self._run_process_once()
            if self.is_folder_deleted:
                run_cleanup_command(self.spec)
                return 0
            if code == 0:
                self._write_process_state("complete", 0)
                return 0
            self._write_process_state("shutdown" if self.stop_requested else "failed", code)
            self._wait_before_restart()
            self.restarts += 1
        return 0

    def _run_process_once(self) -> int:
        with self._open_output_files() as (out, errors):
            if self.spec.prepare_command and (code := self._prepare_process(errors)):
                return code
            child = start_process(self.spec.argv, env=self.spec.env, cwd=self.spec.cwd, stdout=out, stderr=errors, die_with_parent=True)
            self._write_process_state("running")
            return self._wait_for_exit(child)

    def _wait_for_exit(self, child: subprocess.Popen[bytes]) -> int:
        """Wait until the child process exits, and return its exit code.

        If a stop of this process keeper is requested, the request is forwarded to the child once; a failed attempt is retried.
        """
        exit_requested = False
        while True:
            self._write_pending_state()
            if not self.stop_requested and self.folder_monitor.is_deleted():
                self._handle_deleted_folder(child)
            if self.stop_requested and not exit_requested:
                exit_requested = self._request_process_exit(child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=_POLL_SECONDS)

    def _handle_deleted_folder(self, child: subprocess.Popen[bytes]) -> None:
        """Request the child process to exit, and kill it if it does not."""
        self.is_folder_deleted = True
        if not self.spec.name.startswith("node"):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_COORDINATOR_DELAY_SECONDS)
        self.stop_requested = True
        killer = threading.Timer(_KILL_SECONDS, child.kill)
        killer.daemon = True
        killer.start()

    def _request_process_exit(self, child: subprocess.Popen[bytes]) -> bool:
        if not self.spec.stop_command:
            child.terminate()
            return True
        return subprocess.run(self.spec.stop_command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0

    def _prepare_process(self, stderr: IO[bytes]) -> int:
        """Run the prepare command of the process, and return its exit code; -SIGTERM if a stop was requested.

        If the command fails, leftovers of an earlier process are removed, and the command is retried once.
        """
        code = self._run_prepare_command(subprocess.DEVNULL)
        if code and not self.stop_requested:
            run_cleanup_command(self.spec)
            code = self._run_prepare_command(stderr)
        return code or (-signal.SIGTERM if self.stop_requested else 0)

    def _run_prepare_command(self, stderr: IO[bytes] | int) -> int:
        return start_process(
            self.spec.prepare_command, env=self.spec.env, cwd=self.spec.cwd, stdout=subprocess.DEVNULL, stderr=stderr
        ).wait()

    @contextlib.contextmanager
    def _open_output_files(self) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Yield the files for stdout and stderr of the process: one timestamped log, or a plain file for stdout and a log for stderr."""
        out, errors = Path(self.spec.stdout), Path(self.spec.stderr)
        with open_timestamped_log(errors) as log:
            if out == errors:
                yield log, log
            else:
                with open_private_file(out, "ab") as file:
                    yield file, log

    def _wait_before_restart(self) -> None:
        deadline = time.monotonic() + _RESTART_DELAY_SECONDS
        while not self.stop_requested and time.monotonic() < deadline:
            time.sleep(0.05)

    def _write_process_state(self, state: str, exit_code: int | None = None) -> None:
        self.pending_state = ProcessState(os.getpid(), state, exit_code, self.restarts)
        self._write_pending_state()

    def _write_pending_state(self) -> None:
        """Write the newest state. If it cannot be written, it stays pending: a full disk must not end the process."""
        if self.pending_state is not None:
            with contextlib.suppress(OSError):
                write_text_atomically(self.state_path, json.dumps(asdict(self.pending_state)), mode=SECRET_MODE)
                self.pending_state = None

    def _handle_stop_signal(self, *_: Any) -> None:
        self.stop_requested = True


if __name__ == "__main__":
    sys.exit(ProcessKeeper(Path(sys.argv[1])).run_process_with_restarts())
