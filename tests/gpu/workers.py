"""Processes that call functions of this folder: `python workers.py`, which reads calls as JSON lines and writes results as JSON lines.

A call that kills its process, or hangs, fails only the test that made it. What a function prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from swarmtrain import process

_TRACEBACK_LINES, _STDERR_LINES = 6, 12
_TERMINATE_SECONDS = 3.0


class WorkerFailed(Exception):
    """A function has raised an error, or its process has ended or was killed."""


class Worker:
    """A process that calls one function at a time. It is started for the first call, and again for the first call after it has ended."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this worker

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: Callable[..., Any], *, timeout: float, **arguments: Any) -> Any:
        """Call a function at the top level of a module, with JSON values, and return its result. Raises WorkerFailed."""
        self.start(function, **arguments)
        return self.wait(timeout)

    def start(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Start a call, whose result `wait` returns."""
        if self._process is None:
            argv = [sys.executable, str(Path(__file__))]
            pipe = subprocess.PIPE
            self._process = process.start_process(
                argv, env=self._env, stdin=pipe, stdout=pipe, stderr=self._stderr, new_session=True, die_with_parent=True
            )
        call = {"module": function.__module__, "function": function.__name__, "arguments": arguments}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(call).encode() + b"\n")
        self._process.stdin.flush()

    def wait(self, timeout: float) -> Any:
        """Return the result of the call that was started. Raises WorkerFailed, after `timeout` seconds at the latest."""
        child, expired = self._process, threading.Event()
        assert child is not None
        assert child.stdout is not None

        def expire() -> None:
            expired.set()
            _kill_process_group(child)

        timer = threading.Timer(timeout, expire)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if not line:
            returncode = child.wait()
            self._process = None
            cause = f"not finished after {timeout:.0f} s" if expired.is_set() else f"ended with exit code {returncode}"
            raise WorkerFailed("\n".join([cause, *self._read_stderr()]))
        response = json.loads(line)
        if "error" in response:
            raise WorkerFailed(response["error"])
        return response["result"]

    def close(self) -> None:
        """Kill the process, and all processes that it has started."""
        if self._process is not None:
            _kill_process_group(self._process)
            self._process.wait()
            self._process = None

    def _read_stderr(self) -> list[str]:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace").strip().splitlines()[-_STDERR_LINES:]


def call_on_ranks(function: Callable[..., Any], ranks: int, *, timeout: float, **arguments: Any) -> list[Any]:
    """Call `function` on `ranks` ranks, as a launcher starts them. Return their results, in which a WorkerFailed can be one."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = str(free_socket.getsockname()[1])
    rendezvous = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(Worker({**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)})) for rank in range(ranks)]
        for worker in workers:
            worker.start(function, **arguments)
        results: list[Any] = []
        for worker in workers:
            try:
                results.append(worker.wait(timeout))
            except WorkerFailed as error:
                results.append(error)
        return results


def _kill_process_group(child: subprocess.Popen[bytes]) -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal_number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_TERMINATE_SECONDS)


def main() -> None:
    """Call the functions that standard input names, and write their results. A generator is suspended after its first value."""
    suspended = []
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        call = json.loads(line)
        try:
            function = getattr(importlib.import_module(call["module"]), call["function"])
            result = function(**call["arguments"])
            if isinstance(result, Iterator):
                suspended.append(result)
                result = next(result)
            response = {"result": result}
        except Exception:  # noqa: BLE001  # the process continues with the next call
            response = {"error": traceback.format_exc(-_TRACEBACK_LINES).strip()}
        output.write(json.dumps(response) + "\n")
        output.flush()


if __name__ == "__main__":
    main()
