"""How a verb that has the terminal ends: with what was wrong in words, once, whatever rank says so first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import wraps

from swarmtrain.errors import EXIT_INTERRUPTED, EXIT_OK, SwarmtrainError


def verb(act: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int]:
    """Return `act` as what always returns an exit code. Errors of ours are told by rank 0 alone: they befall all ranks alike."""

    @wraps(act)
    def main(argv: Sequence[str]) -> int:
        try:
            return act(argv) or EXIT_OK
        except SwarmtrainError as error:
            _say(error.text)
            return error.exit_code
        except KeyboardInterrupt:
            _say("\ninterrupted\n")
            return EXIT_INTERRUPTED
        except BrokenPipeError:  # `… | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_OK

    return main


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(text)
