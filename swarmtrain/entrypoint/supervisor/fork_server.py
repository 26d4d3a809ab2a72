"""Process creation on a node: torch is imported once in a container's lifetime, and all processes that need torch are forked.

    supervisor ── forkserver ── agent ── its own forkserver ── ranks

The servers are multiprocessing's forkservers. An agent's forkserver is forked from the agent, which has all modules imported, so ranks need
no imports. Ranks are descendants of their agent, so that they are killed with it. The agent of the next round is forked from the
supervisor's forkserver.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, util
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from swarmtrain.process import set_parent_death_signal, set_process_name

_CONTEXT = multiprocessing.get_context("forkserver")
_FORKSERVER_NAME = "forkserver"
_FORKSERVER_DIED_CODE = 255
_forked_forkserver_pid = 0
"""Process id of the forkserver that `use_forked_forkserver` has forked from this process."""


def preload_forkserver() -> None:
    """Start a forkserver that imports what agents and ranks need. The forkserver lives as long as the calling thread."""
    # multiprocessing removes the semaphores of killed processes, as intended; suppress its warning about that.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    _CONTEXT.set_forkserver_preload(["swarmtrain.entrypoint.supervisor.forkserver_preload"])
    # Slurm ends a job by a SIGTERM to all processes of a node. The forkservers ignore it: ranks that are saving would die with them.
    previous_handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGTERM, previous_handler)


def wait_for_preload() -> None:
    """Wait until the forkserver has imported all modules."""
    _CONTEXT.Process(target=os.getpid).start()


def start_forked_process(name: str, main: Callable[..., int], *arguments: object) -> ForkServerProcess:
    """Start `main(*arguments)` in a forked process with its own session and the process name `name`, and return the process.

    The process exits with the exit code that `main` returns.
    """
    process = _CONTEXT.Process(target=_run_as_session_leader, name=name, args=(name, main, *arguments))
    process.start()
    return process


def wait_for_exit_code(process: ForkServerProcess, timeout: float) -> int | None:
    """Return the exit code of `process` (-N: killed by signal N); None if the process still runs after `timeout` seconds."""
    process.join(timeout)
    # The server reports its children's exit codes. If the server itself is killed, its children are killed too.
    return -signal.SIGKILL if process.exitcode == _FORKSERVER_DIED_CODE else process.exitcode


def read_rank_exit_code(process: ForkServerProcess) -> int | None:
    """Return the exit code of a process that this process's forked forkserver has started, as `wait_for_exit_code` without a wait."""
    if process.exitcode == _FORKSERVER_DIED_CODE and not os.waitid(os.P_PID, _forked_forkserver_pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        return _FORKSERVER_DIED_CODE  # the exit code of the process: the server is alive
    return wait_for_exit_code(process, 0.0)


def has_rank_processes(agent: ForkServerProcess) -> bool:
    """Return whether `agent` has rank processes, or descendants of them. Also True if processes cannot be listed."""
    process_names = set()
    for entry in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has just exited
            if os.getsid(int(entry.parent.name)) == agent.pid:
                process_names.add(entry.read_text().strip())
    return not process_names or bool(process_names - {agent.name, _FORKSERVER_NAME})


def kill_process_group(process: ForkServerProcess) -> None:
    """Kill `process` and all its descendants, except those that have left its process group."""
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it has been started
    process.kill()


@contextlib.contextmanager
def use_forked_forkserver() -> Iterator[None]:
    """Within the `with` block, start multiprocessing's forkserver as a fork of this process, not as a new interpreter.

    Call this before any thread is started.
    """
    multiprocessing.set_forkserver_preload([])
    original_spawn, util.spawnv_passfds = util.spawnv_passfds, _fork_forkserver
    try:
        yield
    finally:
        util.spawnv_passfds = original_spawn


def _fork_forkserver(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Fork multiprocessing's forkserver, and return its pid. The child runs the last of `args`, the code that follows `-c`."""
    global _forked_forkserver_pid  # noqa: PLW0603  # this process has one
    parent = os.getpid()
    if pid := os.fork():
        _forked_forkserver_pid = pid
        return pid
    try:
        set_parent_death_signal()
        set_process_name(_FORKSERVER_NAME)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in preload_forkserver; processes forked from it restore the signal
        if os.getppid() == parent:
            exec(args[-1], {})  # noqa: S102  # multiprocessing's own line: from multiprocessing.forkserver import main; main(…)
    finally:
        os._exit(0)


def _run_as_session_leader(process_name: str, main: Callable[..., int], *arguments: object) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_parent_death_signal()
    set_process_name(process_name)
    raise SystemExit(main(*arguments))
