"""How a verb that has the terminal ends: with an exit code, and what was wrong in words."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from swarmtrain.errors import EXIT_INTERRUPTED, EXIT_OK, SwarmtrainError

Asked = TypeVar("Asked")


def verb(act: Callable[[Asked], int | None]) -> Callable[[Asked], int]:
    """Return `act` as what always returns an exit code, and says what was wrong on stderr."""

    @wraps(act)
    def main(asked: Asked) -> int:
        try:
            return act(asked) or EXIT_OK
        except SwarmtrainError as error:
            sys.stderr.write(error.text)
            return error.exit_code
        except KeyboardInterrupt:
            sys.stderr.write("\ninterrupted\n")
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # `… | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK

    return main
