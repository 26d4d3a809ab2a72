"""Start processes; other modules start them only through this one. Commands are argv lists; shell command lines are only for display.

Standard library only, because the entrypoint uses it inside the container.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, NoReturn

from swarmtrain.errors import ProcessError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# Load ctypes here, since no module may be loaded between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def format_command(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return `argv` as one line that can be pasted into a shell, with `env` in front of it."""
    prefix = [f"{key}={shlex.quote(value)}" for key, value in (env or {}).items()]
    return " ".join([*prefix, shlex.join(argv)])


def run_command(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    input: str | None = None,
    timeout: float | None = None,
    hint: str | None = None,
) -> str:
    """Run `argv` to completion and return its standard output.

    `env` is added to this process's environment; `timeout` is in seconds.
    Raises ProcessError, which carries the command and its output, if the program is missing, exits with a nonzero code, or
    does not exit within `timeout`.
    """
    try:
        completed = subprocess.run(
            argv,
            env={**os.environ, **env} if env else None,
            cwd=cwd,
            input=input,
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise ProcessError(format_command(argv, env), 127, f"{error.filename or argv[0]}: no such file or directory", hint=hint) from None
    except PermissionError as error:
        raise ProcessError(format_command(argv, env), 126, f"{error.filename or argv[0]}: permission denied", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise ProcessError(format_command(argv, env), 124, f"did not finish within {timeout:g} s", hint=hint) from None
    if completed.returncode:
        raise ProcessError(format_command(argv, env), completed.returncode, completed.stdout + completed.stderr, hint=hint)
    return completed.stdout


def run_command_with_progress(argv: Sequence[str], report_line: Callable[[str], None], *, env: Mapping[str, str] | None = None) -> None:
    """Run `argv` to completion, and call `report_line` with each line that it prints, without the line end.

    `env` is added to this process's environment. Raises ProcessError, which carries the command and its output, if the program cannot be
    started or exits with a nonzero code.
    """
    lines: list[str] = []
    with start_process(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        for line in child.stdout or ():
            lines.append(line.decode(errors="replace").rstrip())
            report_line(lines[-1])
    if child.returncode:
        raise ProcessError(format_command(argv, env), child.returncode, "\n".join(lines))


def start_process(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    stdout: IO[bytes] | int | None = None,
    stderr: IO[bytes] | int | None = None,
    new_session: bool = False,
    die_with_parent: bool = False,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `argv` and return the running process. Its standard input is /dev/null unless `stdin` is given.

    `new_session` detaches the process from this terminal's Ctrl-C. `die_with_parent` makes the kernel (Linux) kill the process when the
    *thread* that calls this function ends, so call it from a thread that lives as long as the process should. Raises ProcessError if the
    program cannot be started.
    """
    preexec: Callable[[], None] | None = set_parent_death_signal if die_with_parent else None
    try:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env} if env else None,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=new_session,
            preexec_fn=preexec,  # noqa: PLW1509  # a single prctl, loaded beforehand
            pass_fds=pass_fds,
        )
    except OSError as error:
        raise ProcessError(format_command(argv, env), 127, str(error)) from None


def exec_command(argv: Sequence[str], *, env: Mapping[str, str], stdin: IO[bytes] | None = None) -> NoReturn:
    """Replace this process with `argv` (exec), with `env` as its complete environment. The new program inherits the terminal.

    `stdin` replaces the standard input. Raises ProcessError if the program cannot be started.
    """
    try:
        if stdin is not None:
            os.dup2(stdin.fileno(), 0)
        os.execvpe(argv[0], list(argv), dict(env))  # noqa: S606  # no shell is needed
    except OSError as error:
        raise ProcessError(format_command(argv), 127, str(error)) from None


def set_parent_death_signal() -> None:
    """Make the kernel send SIGKILL to the calling process when its parent thread dies. Does nothing outside Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def set_process_name(name: str) -> None:
    """Set the process name that ps and top show, of at most 15 bytes. Does nothing outside Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode())


@contextmanager
def defer_signals() -> Iterator[None]:
    """Context manager that defers SIGINT (Ctrl-C), SIGTERM and SIGHUP to its end, for example while a lock is released.

    Does nothing in threads other than the main thread, since Python runs signal handlers only in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending_signals: list[int] = []

    def record_signal(number: int, _frame: FrameType | None) -> None:
        pending_signals.append(number)

    previous_handlers = {number: signal.signal(number, record_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
        for pending_signal in pending_signals:
            signal.raise_signal(pending_signal)


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit, for this process and all processes that it starts.

    Containers of a fresh Docker 29 installation have a soft limit of 1,024, which data loader workers and connections between ranks exceed.
    """
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # macOS reports an unlimited hard limit, but refuses it as the soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
