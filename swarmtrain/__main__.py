"""The program: from its first moment to its last, Ctrl-C and SIGTERM end it with 130 and without a traceback.

Nothing but the standard library's signal handling is imported before that holds.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from swarmtrain.errors import EXIT_INTERRUPTED

# SIGHUP: the terminal was closed, or the connection to it has broken.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupt:
    """The handler of all of them: raises KeyboardInterrupt, so that whoever is in the middle of something can put it right."""

    def __init__(self) -> None:
        self._times = 0

    def __call__(self, _signal: int, _frame: FrameType | None) -> NoReturn:
        self._times += 1
        if self._times > 1:
            # Not print: the signal may have come in the middle of one.
            os.write(2, b"\ninterrupted again: swarmtrain status shows what is left, swarmtrain down removes it\n")
        raise KeyboardInterrupt


def main() -> NoReturn:
    """Run the command line and exit."""
    code = command()
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # All that must be put right has been. Taking thousands of modules apart would be an eighth of a short command's time.
    os._exit(code)


def command() -> int:
    """Run the command line and return its exit code."""
    try:
        handler = _Interrupt()
        for number in _ENDING:
            # nohup has a reason to ignore one of them.
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, handler)
        # Imports make objects by the ten thousand and no garbage: not looking for any saves a thirtieth of a short command's time.
        gc.set_threshold(100_000)
        from swarmtrain.cli import run

        code = run()
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    for number in _ENDING:
        # Nothing is left to be put right, and an interpreter that shuts down has no use for exceptions.
        signal.signal(number, signal.SIG_DFL)
    return code


if __name__ == "__main__":
    main()
