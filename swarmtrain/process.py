"""The only place that starts processes. Commands are argv lists; a shell line is made only to be shown.

Standard library only, because the entrypoint uses it inside the container.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO, NoReturn

from swarmtrain.errors import ProcessError

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
# Loaded here, since nothing may be loaded between fork and exec.
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def show(argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return `argv` as one line that can be pasted into a shell, with `env` in front of it."""
    prefix = [f"{key}={shlex.quote(value)}" for key, value in (env or {}).items()]
    return " ".join([*prefix, shlex.join(argv)])


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    input: str | None = None,
    timeout: float | None = None,
    hint: str | None = None,
) -> str:
    """Run `argv` to its end and return its standard output.

    `env` is added to this process's environment; `timeout` is in seconds.
    Raises ProcessError, which carries the command and everything it printed, if the program is missing, fails,
    or does not end in time.
    """
    try:
        done = subprocess.run(
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
        raise ProcessError(show(argv, env), 127, f"{error.filename or argv[0]}: no such program or folder", hint=hint) from None
    except PermissionError as error:
        raise ProcessError(show(argv, env), 126, f"{error.filename or argv[0]}: permission denied", hint=hint) from None
    except subprocess.TimeoutExpired:
        raise ProcessError(show(argv, env), 124, f"not done after {timeout:g} s", hint=hint) from None
    if done.returncode:
        raise ProcessError(show(argv, env), done.returncode, done.stdout + done.stderr, hint=hint)
    return done.stdout


def start(
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
    """Start `argv` and return it running, with no standard input unless it is given one.

    `new_session` detaches it from this terminal's Ctrl-C; `die_with_parent` asks the kernel (Linux) to kill it with
    the *thread* that calls this, so call it from a thread that lives as long as the child should.
    Raises ProcessError if the program cannot be started.
    """
    before: Callable[[], None] | None = die_with_parent_now if die_with_parent else None
    try:
        return subprocess.Popen(
            argv,
            env={**os.environ, **env} if env else None,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=new_session,
            preexec_fn=before,  # noqa: PLW1509  # a single prctl, loaded beforehand
            pass_fds=pass_fds,
        )
    except OSError as error:
        raise ProcessError(show(argv, env), 127, str(error)) from None


def become(argv: Sequence[str], *, env: Mapping[str, str], stdin: IO[bytes] | None = None) -> NoReturn:
    """Replace this process by `argv`, with `env` as its whole environment: it has the terminal, and its exit code is ours.

    `stdin`: what it reads instead of our standard input.

    Raises ProcessError if the program cannot be started.
    """
    try:
        if stdin is not None:
            os.dup2(stdin.fileno(), 0)
        os.execvpe(argv[0], list(argv), dict(env))  # noqa: S606  # no shell is wanted
    except OSError as error:
        raise ProcessError(show(argv), 127, str(error)) from None


def die_with_parent_now() -> None:
    """Ask the kernel to SIGKILL the calling process when its parent thread dies. Does nothing outside Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rename(name: str) -> None:
    """Let `ps` and `top` call this process `name`, of which they show 15 bytes. Does nothing outside Linux."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_NAME, name.encode())


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back for a moment in which they would leave something behind that nobody knows of.

    Only the main thread is interrupted by signals, so elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def later(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, later) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for each in came:
            signal.raise_signal(each)
