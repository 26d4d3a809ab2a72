"""Where a node's processes come from: torch is imported once in a container's life, and all that need it are forked from there.

    supervisor ── server ── agent ── its own server ── ranks

The servers are multiprocessing's forkservers. An agent's is forked from the agent, which has imported everything, so that
a new agent, of the next rendezvous round, costs no import either; and the ranks are below it, so that they go with it.
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

from swarmtrain.process import die_with_parent_now, rename

_CONTEXT = multiprocessing.get_context("forkserver")
_SERVER = "forkserver"
_SERVER_DIED = 255


def warm() -> None:
    """Begin to import what agents and ranks need. The server lives as long as the thread that calls this."""
    # multiprocessing removes the semaphores of those that were killed, as it should; it need not warn of them.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    _CONTEXT.set_forkserver_preload(["swarmtrain.entrypoint.preload"])
    # A signal to all processes of a node, which is how Slurm ends a job, is not for the servers: ranks that save go with them.
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGTERM, before)


def await_warmth() -> None:
    """Return when everything is imported."""
    _CONTEXT.Process(target=os.getpid).start()


def start(name: str, main: Callable[..., int], *arguments: object) -> ForkServerProcess:
    """Run `main(*arguments)` in a session of its own, as a process that `ps` calls `name`, and exit with what it returns."""
    process = _CONTEXT.Process(target=_lead, name=name, args=(name, main, *arguments))
    process.start()
    return process


def exit_code(process: ForkServerProcess, timeout: float) -> int | None:
    """Return how `process` has ended (negative: by which signal), None if it lives still after `timeout` seconds."""
    process.join(timeout)
    # The server tells how its children end. When it is killed itself they are killed with it.
    return -signal.SIGKILL if process.exitcode == _SERVER_DIED else process.exitcode


def leads(process: ForkServerProcess) -> bool:
    """Return whether the agent `process` has ranks, or what those have started: whatever a script may call itself.

    Where no processes can be seen: True.
    """
    names = set()
    for entry in Path("/proc").glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getsid(int(entry.parent.name)) == process.pid:
                names.add(entry.read_text().strip())
    return not names or bool(names - {process.name, _SERVER})


def kill(process: ForkServerProcess) -> None:
    """Kill `process` and all that it has started, but for what has left its session's process group."""
    with contextlib.suppress(ProcessLookupError, TypeError):
        os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]  # it has been started
    process.kill()


@contextlib.contextmanager
def forked_server() -> Iterator[None]:
    """In the body, let multiprocessing's forkserver be a fork of this process instead of a new interpreter. Before any thread."""
    multiprocessing.set_forkserver_preload([])
    before, util.spawnv_passfds = util.spawnv_passfds, _fork_instead
    try:
        yield
    finally:
        util.spawnv_passfds = before


def _fork_instead(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Do in a fork what the interpreter is told to do by `-c`, the last of its arguments; return its pid."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    try:
        die_with_parent_now()
        rename(_SERVER)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as in warm; whatever it forks takes the signal back
        if os.getppid() == parent:
            exec(args[-1], {})  # noqa: S102  # multiprocessing's own line: from multiprocessing.forkserver import main; main(…)
    finally:
        os._exit(0)


def _lead(name: str, main: Callable[..., int], *arguments: object) -> NoReturn:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    die_with_parent_now()
    rename(name)
    raise SystemExit(main(*arguments))
