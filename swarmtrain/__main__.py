"""Entry point of the `swarmtrain` program. Ctrl-C, SIGTERM and SIGHUP end it with exit code 130, at any time and without a traceback.

Only the standard library's signal handling is imported before the signal handlers are installed.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from swarmtrain.errors import EXIT_INTERRUPTED

# SIGHUP: the terminal was closed, or its connection was lost.
_TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _InterruptHandler:
    """Signal handler for SIGINT, SIGTERM and SIGHUP: raises KeyboardInterrupt, so that the interrupted code can clean up."""

    def __init__(self) -> None:
        self._interrupt_count = 0

    def __call__(self, _signal: int, _frame: FrameType | None) -> NoReturn:
        self._interrupt_count += 1
        if self._interrupt_count > 1:
            # print is not reentrant: the signal may have arrived in the middle of a print call.
            os.write(2, b"\ninterrupted again: swarmtrain status shows what is left, swarmtrain down removes it\n")
        raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line and exit."""
    code = run_program()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # All cleanup is done. Skip the interpreter's shutdown, which takes 12 % of a short command's time.
    os._exit(code)


def run_program() -> int:
    """Run the command line and return its exit code."""
    _prepare_standard_streams()
    try:
        handler = _InterruptHandler()
        for number in _TERMINATION_SIGNALS:
            # Under nohup SIGHUP is ignored on purpose; keep it ignored.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
        # Imports create tens of thousands of objects but no garbage: fewer garbage collections save 3 % of a short command's time.
        gc.set_threshold(100_000)
        from swarmtrain.cli import run_command_line

        code = run_command_line()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    for number in _TERMINATION_SIGNALS:
        # No cleanup is left to do, and exceptions are useless during interpreter shutdown.
        signal.signal(number, signal.SIG_DFL)
    return code


def _prepare_standard_streams() -> None:
    """Open the standard streams that the caller has closed on /dev/null, and let them replace characters that their encoding lacks.

    Otherwise the next opened file would take the number of a closed stream, and would receive what is printed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
