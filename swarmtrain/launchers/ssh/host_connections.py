"""Connections from a launcher to the hosts of a run: this machine is called directly, other hosts over SSH.

For the duration of a command, one `ssh` process per host transfers first the modules of swarmtrain.remote as a zip file, then requests
and responses. Neither config values nor secrets ever become part of a shell command line.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import shlex
import subprocess
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar, cast
from weakref import finalize

from swarmtrain import process
from swarmtrain.config.schema.fields.host_entry import HostEntry
from swarmtrain.config.schema.runner import RunnerConfig
from swarmtrain.errors import HostError, SwarmtrainError
from swarmtrain.launchers.common.history_store import resolve_state_directory
from swarmtrain.launchers.common.local_run_folder import LocalRunFolder, translate_os_errors
from swarmtrain.remote.remote_agent import READY_LINE, RemoteAgent, get_runs_folder
from swarmtrain.remote.run_folder import HostRunFolder

LOCALHOST = "localhost"
"""Host name of this machine, which is called without SSH."""
T = TypeVar("T")
_CALL_TIMEOUT_SECONDS = 60.0
_SSH_EXIT_TIMEOUT_SECONDS = 10.0
_CLOSE_TIMEOUT_SECONDS = 3.0
# ssh detects a dead host within 15 s; a slow login may also take 15 s.
_SSH_ARGV = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
_MAX_PARALLEL_HOSTS = 64
_AGENT_FILES = ("__init__.py", "atomic_file.py", "errors.py", "process.py", "remote/*.py")
_AGENT_BOOTSTRAP = """
import sys, os, json, pathlib
header = json.loads(sys.stdin.buffer.readline())
base = pathlib.Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "swarmtrain" / ".hosts"
base.mkdir(mode=0o700, parents=True, exist_ok=True)
archive = base / (header["digest"] + ".zip")
content = sys.stdin.buffer.read(header["size"])
if not archive.exists():
    new = base / (".%s.%d" % (header["host"], os.getpid()))
    new.write_bytes(content)
    new.replace(archive)
sys.path.insert(0, str(archive))
from swarmtrain.remote import remote_agent
remote_agent.serve_requests(remote_agent.get_runs_folder(header["host"]))
"""


def list_hosts(runner: RunnerConfig) -> tuple[HostEntry, ...]:
    """Return the hosts in the config; this machine if the config lists none."""
    return runner.host_entries or (HostEntry.parse(LOCALHOST),)


class Host(Protocol):
    """Interface of a host that answers the requests of swarmtrain.remote.remote_agent.RemoteAgent."""

    @property
    def name(self) -> str:
        """Name of the host in the config."""
        ...

    def call_agent(self, method: str, *, timeout: float = _CALL_TIMEOUT_SECONDS, **fields: Any) -> Any:
        """Call `method` of the remote agent and return the response. Raises HostError if it fails, or takes more than `timeout` seconds."""
        ...

    def close(self) -> None:
        """Close the connection to the host. Processes on the host keep running."""
        ...


class LocalHost:
    """This machine as a host, called without SSH."""

    name = LOCALHOST

    def __init__(self) -> None:
        self._agent = RemoteAgent(get_runs_folder(LOCALHOST))

    def call_agent(self, method: str, *, timeout: float = _CALL_TIMEOUT_SECONDS, **fields: Any) -> Any:
        """Call `method` of the agent in this process and return the result. Raises HostError if it fails."""
        try:
            return self._agent.handle_request(method, fields)
        except (OSError, SwarmtrainError) as error:
            raise HostError(str(error), place=f"host {self.name}") from None

    def close(self) -> None:
        """Do nothing: there is no connection."""


class StateDirectoryHost:
    """This machine as a host whose runs are in the state directory itself, where other launchers of this machine find them, too."""

    name = LOCALHOST

    def __init__(self, open_folder: Callable[[Path], HostRunFolder] = LocalRunFolder) -> None:
        """`open_folder`: returns the run folder at a path."""
        self._agent = RemoteAgent(resolve_state_directory(), open_folder=open_folder)

    def call_agent(self, method: str, *, timeout: float = _CALL_TIMEOUT_SECONDS, **fields: Any) -> Any:
        """Call `method` of the agent in this process and return the result. Raises StateDirectoryError, or the method's error."""
        with translate_os_errors():
            return self._agent.handle_request(method, fields)

    def close(self) -> None:
        """Do nothing: there is no connection."""


class RemoteHost:
    """Host reached by `ssh NAME`, with the settings that the user's ~/.ssh/config has for this name."""

    def __init__(self, name: str, interpreter: str) -> None:
        self.name, self.python = name, interpreter
        self._connection: _SshConnection | None = None
        self._call_lock = threading.Lock()

    def call_agent(self, method: str, *, timeout: float = _CALL_TIMEOUT_SECONDS, **fields: Any) -> Any:
        """Call `method` of the remote agent and return the response.

        Raises HostError if it fails; the next request then opens a new connection.
        """
        with self._call_lock:
            try:
                if self._connection is None:
                    self._connection = _SshConnection(self.name, self.python)
                    self._connection.upload_agent()
                reply = self._connection.exchange_message([method, fields], timeout)
            except BaseException:
                self._close_connection()
                raise
        if "error" in reply:
            raise HostError(reply["error"], place=f"host {self.name}")
        return reply["answer"]

    @property
    def is_idle(self) -> bool:
        """Whether the connection to the host is open and no request is in progress."""
        connection = self._connection
        return connection is not None and connection.ssh.poll() is None and not self._call_lock.locked()

    def close(self) -> None:
        """Close the connection to the host. A request in progress has a few seconds to complete, and then fails."""
        if not self._call_lock.acquire(timeout=_CLOSE_TIMEOUT_SECONDS):
            if (connection := self._connection) is not None:
                connection.ssh.kill()
            self._call_lock.acquire()
        try:
            self._close_connection()
        finally:
            self._call_lock.release()

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _SshConnection:
    """One `ssh` process and its pipes."""

    def __init__(self, host_name: str, interpreter: str) -> None:
        self.name, self.python = host_name, interpreter
        argv = [*_SSH_ARGV, "--", host_name, shlex.join([interpreter, "-c", f"exec({_AGENT_BOOTSTRAP!r})"])]
        # Start ssh in its own session: otherwise Ctrl-C would end it before the interrupted command is rolled back.
        pipe = subprocess.PIPE
        self.ssh = process.start_process(argv, stdin=pipe, stdout=pipe, stderr=pipe, new_session=True)
        self.stdin, self.stdout, stderr = (cast("IO[bytes]", stream) for stream in (self.ssh.stdin, self.ssh.stdout, self.ssh.stderr))
        # An open pipe keeps ssh alive, and Python's list of running children keeps the pipe open. The finalizer must neither start a
        # thread nor wait: the garbage collector may run it while any lock is held.
        finalize(self, self.stdin.close)
        os.set_blocking(self.stdin.fileno(), False)
        self.read_buffer = b""
        self.stderr_lines: deque[str] = deque(maxlen=20)
        self.stderr_reader = threading.Thread(target=_collect_stderr_lines, args=(stderr, self.stderr_lines), daemon=True)
        self.stderr_reader.start()

    def upload_agent(self) -> None:
        """Send the remote agent to the host, and wait until it is ready. Raises HostError if it does not start."""
        archive = _build_agent_archive()
        header = {"size": len(archive), "digest": sha256(archive).hexdigest()[:16], "host": self.name}
        deadline = time.monotonic() + _CALL_TIMEOUT_SECONDS
        self._send_bytes(json.dumps(header).encode() + b"\n" + archive, deadline)
        while self._read_line(deadline).decode(errors="replace").strip() != READY_LINE:
            pass

    def exchange_message(self, message: list[Any], timeout: float) -> dict[str, Any]:
        """Send `message` to the remote agent and return the response. Raises HostError if no response arrives within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        self._send_bytes(json.dumps(message).encode() + b"\n", deadline)
        return dict(json.loads(self._read_line(deadline)))

    def close(self) -> None:
        """Close the connection, and wait until the remote agent has ended its current request."""
        with contextlib.suppress(OSError):
            self.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ssh.wait(_SSH_EXIT_TIMEOUT_SECONDS)
        if self.ssh.poll() is None:
            self.ssh.kill()
            self.ssh.wait()
        self.stdout.close()

    def _send_bytes(self, content: bytes, deadline: float) -> None:
        while content:
            if not select.select([], [self.stdin], [], max(0.0, deadline - time.monotonic()))[1]:
                raise self._build_timeout_error()
            try:
                content = content[os.write(self.stdin.fileno(), content) :]
            except OSError:
                raise self._build_closed_error() from None

    def _read_line(self, deadline: float) -> bytes:
        chunks = [self.read_buffer]
        while b"\n" not in chunks[-1]:
            if not select.select([self.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise self._build_timeout_error()
            if not (chunk := os.read(self.stdout.fileno(), 1 << 20)):
                raise self._build_closed_error()
            chunks.append(chunk)
        line, _, self.read_buffer = b"".join(chunks).partition(b"\n")
        return line

    def _build_timeout_error(self) -> HostError:
        return HostError("does not answer", place=f"host {self.name}", hint=f"test the connection with: ssh {self.name} true")

    def _build_closed_error(self) -> HostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.ssh.wait(_SSH_EXIT_TIMEOUT_SECONDS)
        self.stderr_reader.join(1.0)
        messages = [line for line in self.stderr_lines if not line.startswith("Warning: Permanently added")]
        text = messages[-1].strip() if messages else "the SSH connection has ended"
        return HostError(text, place=f"host {self.name}", hint=_suggest_connection_fix(self.name, text, self.python, self.ssh.returncode))


class ConnectionPool:
    """Pool of connections: a command that calls the same hosts repeatedly opens each connection only once.

    Idle connections stay open until the pool is closed.
    """

    def __init__(self, connect_local_host: Callable[[], Host] = LocalHost) -> None:
        self._idle: dict[tuple[str, str], RemoteHost] = {}
        self._connect_local_host = connect_local_host

    def build_host_group(self, names: Sequence[str], interpreters: Mapping[str, str]) -> HostGroup:
        """Return the group of the hosts `names`, each with its Python interpreter. Connections are opened on the first request."""
        return HostGroup([self._take_host(name, interpreters) for name in names], interpreters, self._return_host)

    def _take_host(self, name: str, interpreters: Mapping[str, str]) -> Host:
        if name == LOCALHOST:
            return self._connect_local_host()
        host = self._idle.pop((name, interpreters[name]), None)
        return host if host and host.is_idle else RemoteHost(name, interpreters[name])

    def _return_host(self, host: Host) -> None:
        if isinstance(host, RemoteHost) and host.is_idle and (host.name, host.python) not in self._idle:
            self._idle[host.name, host.python] = host
        else:
            host.close()


class HostGroup:
    """Group of hosts that are called in parallel."""

    def __init__(
        self, hosts: Sequence[Host], interpreters: Mapping[str, str], release: Callable[[Host], None] = lambda host: host.close()
    ) -> None:
        self.hosts = {host.name: host for host in hosts}
        self._pythons, self._release = interpreters, release

    def __enter__(self) -> HostGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_interpreter(self, host_name: str) -> str:
        """Return the path of the Python interpreter used on the host `host_name`."""
        return self._pythons[host_name]

    def run_on_hosts(self, function: Callable[[Host], T], host_names: Collection[str] | None = None) -> dict[str, T]:
        """Call `function` for each host, or each in `host_names`, in parallel, and return the results by host.

        Raises the first HostError, after all calls have ended.
        """
        results, failed = self.collect_results_and_errors(function, host_names)
        for error in failed.values():
            raise error
        return results

    def collect_results_and_errors(
        self, work: Callable[[Host], T], host_names: Collection[str] | None = None
    ) -> tuple[dict[str, T], dict[str, HostError]]:
        """Call `work` for each host, or each in `host_names`, in parallel. Return the results by host, and the HostErrors by host.

        This machine alone is called in this thread, so that a signal interrupts the call.
        """
        names = [name for name in self.hosts if host_names is None or name in host_names]
        results: dict[str, T] = {}
        failed: dict[str, HostError] = {}
        calls: dict[str, Callable[[], T]] = {name: partial(work, self.hosts[name]) for name in names}
        if any(isinstance(self.hosts[name], RemoteHost) for name in names):
            with ThreadPoolExecutor(min(_MAX_PARALLEL_HOSTS, len(names))) as pool:
                calls = {name: pool.submit(call).result for name, call in calls.items()}
        for name, call in calls.items():
            try:
                results[name] = call()
            except HostError as error:
                failed[name] = error
        return results, failed

    def close(self) -> None:
        """Release the connections to all hosts."""
        with contextlib.suppress(HostError):
            self.run_on_hosts(self._release)


def connect_hosts(names: Sequence[str], interpreters: Mapping[str, str]) -> HostGroup:
    """Return the group of the hosts `names`, each with its Python interpreter. Connections are opened on the first request."""
    return HostGroup([LocalHost() if name == LOCALHOST else RemoteHost(name, interpreters[name]) for name in names], interpreters)


def _build_agent_archive() -> bytes:
    """Return the modules that a host needs as a zip file with the process keeper as its main program. The bytes are deterministic."""
    root = Path(__file__).parents[2]
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for pattern in _AGENT_FILES for path in root.glob(pattern)):
            archive.writestr(zipfile.ZipInfo(f"swarmtrain/{path.relative_to(root)}"), path.read_bytes())
        archive.writestr(
            zipfile.ZipInfo("__main__.py"), b"import runpy\nrunpy.run_module('swarmtrain.remote.process_keeper', run_name='__main__')\n"
        )
    return content.getvalue()


def _collect_stderr_lines(stream: IO[bytes], lines: deque[str]) -> None:
    with stream:
        lines.extend(line.decode(errors="replace").rstrip() for line in stream if line.strip())


def _suggest_connection_fix(host_name: str, error_message: str, interpreter: str, exit_code: int | None) -> str:
    if "Permission denied" in error_message:
        return f"ssh-copy-id {host_name} enables login without a password; test it with: ssh {host_name} true"
    if "Host key verification failed" in error_message:
        return f"run ssh {host_name} once, and accept its host key"
    if exit_code in (126, 127):
        return f"set runner.python to an interpreter that exists on the hosts; {interpreter} is not on {host_name}"
    return f"to see the complete error, run: ssh {host_name} true"
