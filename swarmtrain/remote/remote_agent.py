"""The remote agent of a launcher on a machine: handles one request at a time, as direct calls or as JSON lines over SSH.

Over SSH, standard input first carries a zip file with this module, then the requests, so the machine needs nothing but Python 3.8. Each
public method of RemoteAgent is a request. Request data never appears in a command line or environment.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from swarmtrain.atomic_file import create_private_folder, open_private_file, write_files_atomically
from swarmtrain.remote.process_spec import ProcessSpec
from swarmtrain.remote.run_folder import EVENTS_FILE, LOCK_FILE, HostRunFolder

READY_LINE = "swarmtrain remote agent"
"""Line that the agent prints before the first response. Output before it comes from shell start-up files."""
_NVIDIA_GPUS_FOLDER = Path("/proc/driver/nvidia/gpus")
_MAX_READ_BYTES = 1 << 22
_POLL_SECONDS = 0.1
_CHECK_TIMEOUT_SECONDS = 60.0
_CHECK_SCRIPT = """
import importlib.util, json, sys
import swarmtrain
print(json.dumps({"swarmtrain": swarmtrain.__version__, "torch": importlib.util.find_spec("torch") is not None}))
"""


class RemoteAgent:
    """Remote agent, which operates on the run folders in `runs_folder`. `open_folder`: returns the run folder at a path."""

    def __init__(
        self,
        runs_folder: Path,
        open_folder: Callable[[Path], HostRunFolder] = HostRunFolder,
    ) -> None:
        self.base = runs_folder
        self._open_folder = open_folder
        self._locks: dict[str, IO[str]] = {}

    def handle_request(self, method: str, arguments: dict[str, Any]) -> Any:
        """Call the method `method` with the arguments `arguments`, and return its result. Exceptions of the method propagate."""
        if method.startswith("_") or method == "handle_request":
            raise ValueError(f"unknown request: {method}")
        return getattr(self, method)(**arguments)

    def describe_host(self, cwd: str = "", ports: tuple[int, ...] = ()) -> dict[str, Any]:
        """Return facts about this machine, including which of `ports` are in use, and whether the folder `cwd` exists."""
        connection = os.environ.get("SSH_CONNECTION", "").split()
        return {
            "host": socket.gethostname(),
            "address": connection[2] if len(connection) == 4 else "",  # SSH_CONNECTION has four fields; the third is this machine's address
            "python": platform.python_version(),
            "gpus": len(list(_NVIDIA_GPUS_FOLDER.glob("*"))),
            "time": time.time(),
            "user": f"{os.getuid()}:{os.getgid()}",
            "home": str(Path.home()),
            "cwd": bool(cwd) and Path(cwd).is_dir(),
            "taken_ports": [port for port in ports if _is_port_taken(port)],
        }

    def check_interpreter(self, argv: list[str], env: dict[str, str]) -> dict[str, Any]:
        """Return the version of swarmtrain that the interpreter `argv` imports, and whether torch is installed; or the `error`."""
        try:
            completed = subprocess.run(
                [*argv, "-c", _CHECK_SCRIPT],
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_CHECK_TIMEOUT_SECONDS,
                check=True,
            )
            return dict(json.loads(completed.stdout.splitlines()[-1]))
        except subprocess.CalledProcessError as error:
            return {"error": error.stderr.strip().splitlines()[-1] if error.stderr.strip() else f"exit code {error.returncode}"}
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            return {"error": str(error)}

    def run_command(self, argv: list[str], seconds: float, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Run `argv` with `env` added to the environment, for at most `seconds`. Return its exit code and output."""
        environment = {**os.environ, **env} if env else None
        try:
            completed = subprocess.run(
                argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return {"exit_code": 127, "output": str(error)}
        return {"exit_code": completed.returncode, "output": completed.stdout + completed.stderr}

    def update_marker(self, path: str, action: str) -> bool:
        """Create or remove the empty file `path`, or check whether it exists, depending on `action`.

        Return whether it exists afterwards; False on any error.
        """
        with contextlib.suppress(OSError):
            if action == "create":
                Path(path).touch()
            elif action == "remove":
                Path(path).unlink(missing_ok=True)
            return Path(path).exists()
        return False

    def inspect_run(self, run: str) -> dict[str, Any]:
        """Return the content of the run's folder: path, marker (None if the run does not exist), specs, states, and live processes."""
        folder = self._get_run_folder(run)
        names = folder.list_process_names()
        # List live processes first: a process that starts later is then missing, instead of alive without its spec.
        alive = [name for name in names if folder.is_process_alive(name)]
        return {
            "path": str(folder.path),
            "marker": folder.load_marker(),
            "specs": {name: asdict(spec) for name in names if (spec := folder.load_process_spec(name))},
            "states": {name: folder.describe_process_state(name) for name in names},
            "alive": alive,
        }

    def write_files(self, run: str, files: dict[str, tuple[str, int]]) -> None:
        """Write all `files` (name → content in base64, file mode) into the run's folder, or none; remove all other code files."""
        run_folder = self._get_run_folder(run)
        folder = run_folder.path
        for name, mode in ((".", 0o700), ("code", 0o755), ("logs", 0o755), ("secrets", 0o700)):
            (folder / name).mkdir(mode=mode, parents=True, exist_ok=True)
        write_files_atomically({folder / name: (base64.b64decode(content), mode) for name, (content, mode) in files.items()})
        run_folder.remove_other_code_files({name[len("code/") :] for name in files if name.startswith("code/")})

    def read_files(self, run: str, names: list[str]) -> dict[str, str]:
        """Return the contents of files in the run's folder, in base64."""
        folder = self._get_run_folder(run).path
        return {name: base64.b64encode((folder / name).read_bytes()).decode() for name in names}

    def delete_files(self, run: str, names: list[str]) -> None:
        """Delete files in the run's folder."""
        for name in names:
            (self._get_run_folder(run).path / name).unlink(missing_ok=True)

    def start_processes(self, run: str, specs: list[dict[str, Any]]) -> None:
        """Start a process keeper for each of `specs`."""
        for spec in specs:
            self._get_run_folder(run).start_process_keeper(ProcessSpec(**spec))

    def stop_processes(self, run: str, names: list[str] | None, grace: float) -> None:
        """Stop the processes `names` of the run (None: all) and all their descendants. Their files are kept.

        `grace`: seconds that the processes have to exit after SIGTERM.
        """
        folder = self._get_run_folder(run)
        folder.stop_processes(folder.list_process_names() if names is None else names, grace)

    def delete_process_files(self, run: str, names: list[str]) -> None:
        """Delete the files of the process keepers `names`; their logs are kept."""
        for name in names:
            self._get_run_folder(run).delete_process_files(name)

    def rotate_events(self, run: str) -> None:
        """Move the run's events and logs to numbered files, and start new ones."""
        self._get_run_folder(run).rotate_events()

    def remove_run(self, run: str) -> None:
        """Remove the run and its files on this machine, including the events and logs in its folder."""
        self._get_run_folder(run).remove_run()

    def lock_run(self, run: str, owner: str) -> str:
        """Acquire the lock for changes to the run, until `unlock_run` or the end of this agent.

        Return an empty string; if another process holds the lock, return its owner.
        """
        folder = self._get_run_folder(run).path
        create_private_folder(folder)
        file, holder = _acquire_lock(folder / LOCK_FILE, owner)
        if file:
            self._locks[run] = file
        return holder

    def unlock_run(self, run: str) -> None:
        """Release the lock for changes to the run. If the run's folder contains nothing else, remove the folder."""
        if file := self._locks.pop(run, None):
            folder = self._get_run_folder(run).path
            with contextlib.suppress(OSError):
                if [entry.name for entry in folder.iterdir()] == [LOCK_FILE]:
                    (folder / LOCK_FILE).unlink()
                    folder.rmdir()
            file.close()

    def poll_changes(self, run: str, offsets: dict[str, int], wait_seconds: float = 0.0, tail: int | None = None) -> dict[str, Any]:
        """Return the run's status and the response of `read_new_lines`, as soon as one of them changes, or after `wait_seconds`."""
        deadline = time.monotonic() + wait_seconds
        previous_status: Any = None
        while True:
            inspection = self.inspect_run(run)
            status = {**{key: inspection[key] for key in ("states", "alive")}, "exists": inspection["marker"] is not None}
            lines = self.read_new_lines(run, offsets, tail)
            if lines["files"] or time.monotonic() >= deadline or previous_status not in (None, status):
                return {**status, **lines}
            previous_status = status
            time.sleep(_POLL_SECONDS)

    def read_new_lines(
        self, run: str, offsets: dict[str, int], tail: int | None = None, file_names: list[str] | None = None
    ) -> dict[str, Any]:
        """Return the new complete lines of the run's files.

        `offsets`: number of bytes of each file that were read before. A file without an offset is read from its start, or its last `tail`
        lines. `file_names`: files to read (default: all). If the response has `has_more`, the caller repeats the request immediately.
        """
        contents: dict[str, str] = {}
        new_offsets: dict[str, int] = {}
        has_more = False
        folder = self._get_run_folder(run)
        for path in (folder.events_path, *(folder.get_log_path(name) for name in folder.list_process_names())):
            if file_names is not None and path.name not in file_names:
                continue
            with contextlib.suppress(OSError), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                offset = offsets.get(path.name)
                offset = (
                    (0 if tail is None or (path.name == EVENTS_FILE and file_names is None) else _find_tail_offset(file, size, tail))
                    if offset is None or offset > size
                    else offset
                )
                file.seek(offset)
                complete_lines, newline, _ = file.read(_MAX_READ_BYTES).rpartition(b"\n")
                new_offsets[path.name] = offset
                if newline:
                    contents[path.name] = complete_lines.decode(errors="replace")
                    new_offsets[path.name] = offset + len(complete_lines) + 1
                    has_more = has_more or offset + _MAX_READ_BYTES < size
        return {"files": contents, "offsets": new_offsets, "has_more": has_more}

    def _get_run_folder(self, run: str) -> HostRunFolder:
        return self._open_folder(self.base / run)


def serve_requests(runs_folder: Path) -> None:
    """Serve requests on standard input until it closes, which means that the caller is gone. Started processes keep running."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of child processes must not mix with responses
    agent = RemoteAgent(runs_folder)
    out.write(READY_LINE + "\n")
    out.flush()
    for line in sys.stdin:
        try:
            method, fields = json.loads(line)
            reply = {"answer": agent.handle_request(method, fields)}
        except Exception as error:  # noqa: BLE001  # any error is reported to the caller
            text = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            location = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
            reply = {"error": location + text.lower() if isinstance(error, OSError) else f"{type(error).__name__}: {text}"}
        out.write(json.dumps(reply) + "\n")
        out.flush()


def _acquire_lock(path: Path, owner: str) -> tuple[IO[str] | None, str]:
    """Acquire the lock file `path`. Return the open file, which holds the lock until it is closed; or None and the current holder."""
    file = open_private_file(path, "a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read() or "somebody"
        file.close()
        return None, holder
    file.truncate(0)
    file.write(owner)
    file.flush()
    return file, ""


def get_runs_folder(host: str) -> Path:
    """Return the folder of all runs on the machine that launchers call `host`. Hosts that share a home directory have separate folders."""
    state_home = os.environ.get("XDG_STATE_HOME")
    return (Path(state_home) if state_home else Path("~/.local/state").expanduser()) / "swarmtrain" / ".hosts" / host


def _is_port_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def _find_tail_offset(file: IO[bytes], size: int, line_count: int) -> int:
    """Return the byte offset at which the last `line_count` lines of a file of `size` bytes begin."""
    end, tail = size, b""
    while end > 0 and tail.count(b"\n") <= line_count:
        start = max(0, end - (1 << 16))
        file.seek(start)
        tail, end = file.read(end - start) + tail, start
    last_lines = tail.splitlines(keepends=True)[-line_count:] if line_count else []
    return size - sum(map(len, last_lines))
