"""Processes of the acceptance run: each calls one function, and writes its rows as JSON lines.

    python -m swarmtrain.trainer.acceptance.worker MODULE FUNCTION < arguments.json

The function returns or yields rows. Everything else that is written to stdout goes to stderr.
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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import IO, Any

from swarmtrain import process
from swarmtrain.trainer.acceptance.rows import Outcome, Row

StageFunction = Callable[..., Iterator[Row]]
"""A function at the top level of a module; its arguments are JSON values."""

_STDERR_LINES = 12
_TERMINATE_SECONDS = 3.0
_running: set[subprocess.Popen[bytes]] = set()


def run_worker(
    function: StageFunction,
    arguments: Mapping[str, Any],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
    restart_timer: bool = False,
) -> Iterator[Row]:
    """Call `function` with `arguments` in a process of its own, and yield its rows as they arrive.

    `env` is added to the process's environment. If the process fails, or does not end within `timeout` seconds (`restart_timer`: has no
    new row for that time), the last row says so, under the name of the function. All processes that it has started are killed.
    """
    with tempfile.TemporaryFile() as stderr:
        child = _start_worker(function, arguments, env or {}, stderr)
        with _kill_after(timeout, child) as timer:
            for line in child.stdout or ():
                values = json.loads(line)
                yield Row(**{**values, "outcome": Outcome(values["outcome"])})
                if restart_timer:
                    timer.restart()
            child.wait()
        if timer.has_expired or child.returncode:
            stderr.seek(0)
            lines = stderr.read().decode(errors="replace").strip().splitlines()[-_STDERR_LINES:]
            cause = f"not finished after {timeout:.0f} s" if timer.has_expired else _describe_exit(child.returncode)
            yield Row(function.__name__, Outcome.failed, reason="\n".join([cause, *lines]))


def run_items_in_workers(
    function: StageFunction, items: Mapping[str, Any], *, timeout: float, env: Mapping[str, str] | None = None
) -> Iterator[Row]:
    """Call `function` with `items`, for each of which it yields a row with the item's name, in their order.

    One process runs all items. If it dies, or takes longer than `timeout` seconds for an item, that item has failed, and a new process
    continues with the next one.
    """
    remaining = dict(items)
    while remaining:
        before = len(remaining)
        for row in run_worker(function, {"items": dict(remaining)}, timeout=timeout, env=env, restart_timer=True):
            if remaining:
                current = next(iter(remaining))
                yield replace(row, name=current)
                del remaining[current]
        if len(remaining) == before:
            raise AssertionError(f"{function.__name__} yields no row for {next(iter(remaining))}")


def run_worker_ranks(function: StageFunction, arguments: Mapping[str, Any], ranks: int, *, timeout: float) -> list[Row]:
    """Call `function` with `arguments` on `ranks` ranks, as a launcher starts them. Return the rows of all ranks, in order."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = str(free_socket.getsockname()[1])
    rendezvous = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    results: list[list[Row]] = [[] for _ in range(ranks)]

    def run_rank(rank: int) -> None:
        env = {**rendezvous, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        results[rank] = list(run_worker(function, arguments, timeout=timeout, env=env))

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [row for rows in results for row in rows]


class _KillTimer:
    """Kills the process group of `child` after `seconds`."""

    def __init__(self, seconds: float, child: subprocess.Popen[bytes]) -> None:
        self.has_expired = False
        self._seconds, self._child, self._timer = seconds, child, threading.Timer(seconds, self._expire)
        self._timer.start()

    def restart(self) -> None:
        """Start counting from zero."""
        self.cancel()
        self._timer = threading.Timer(self._seconds, self._expire)
        self._timer.start()

    def cancel(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _expire(self) -> None:
        self.has_expired = True
        _kill_process_group(self._child)


@contextlib.contextmanager
def _kill_after(seconds: float, child: subprocess.Popen[bytes]) -> Iterator[_KillTimer]:
    """Context manager: kills the process group of `child` after `seconds`, and what remains of it at the end of the body."""
    timer = _KillTimer(seconds, child)
    _running.add(child)
    try:
        yield timer
    finally:
        timer.cancel()
        _kill_process_group(child)
        _running.discard(child)


def kill_workers() -> None:
    """Kill all processes that this process has started, so that the functions that read their rows return."""
    for child in list(_running):
        _kill_process_group(child)


def _start_worker(
    function: StageFunction, arguments: Mapping[str, Any], env: Mapping[str, str], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    request = tempfile.TemporaryFile()  # noqa: SIM115  # the started process inherits it
    request.write(json.dumps(arguments).encode())
    request.seek(0)
    argv = [sys.executable, "-m", __name__, function.__module__, function.__name__]
    return process.start_process(
        argv, env=env, stdin=request, stdout=subprocess.PIPE, stderr=stderr, new_session=True, die_with_parent=True
    )


def _kill_process_group(child: subprocess.Popen[bytes]) -> None:
    """Terminate `child` and all processes of its session, and kill those that remain."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal_number)
        deadline = time.monotonic() + _TERMINATE_SECONDS
        while child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


def _describe_exit(returncode: int) -> str:
    return f"ended by {signal.Signals(-returncode).name}" if returncode < 0 else f"ended with exit code {returncode}"


def main(argv: Sequence[str]) -> None:
    """Call the function that `argv` names with the arguments on standard input, and write its rows."""
    module, function = argv
    arguments = json.load(sys.stdin)
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    rows: Iterator[Row] = getattr(importlib.import_module(module), function)(**arguments)
    for row in rows:
        output.write(json.dumps(asdict(row)) + "\n")
        output.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
