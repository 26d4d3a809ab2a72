"""Exit codes and error messages of commands that run in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from swarmtrain.errors import EXIT_INTERRUPTED, EXIT_OK, SwarmtrainError

Request = TypeVar("Request")


def handle_cli_errors(command: Callable[[Request], int | None]) -> Callable[[Request], int]:
    """Wrap `command` so that it always returns an exit code, and prints a SwarmtrainError to stderr instead of raising it."""

    @wraps(command)
    def main(request: Request) -> int:
        try:
            return command(request) or EXIT_OK
        except SwarmtrainError as error:
            sys.stderr.write(error.plain_text)
            return error.exit_code
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted\n")
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # `… | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK

    return main
