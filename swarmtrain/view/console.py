"""Talk to a person on stderr: lines of progress with a spinner on a terminal, plain lines elsewhere, errors with hints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmtrain.errors import SwarmtrainError

if TYPE_CHECKING:
    from swarmtrain.launchers.base import Finding, Say

_RED, _DIM, _OFF = "\033[31m", "\033[2m", "\033[0m"


def say(line: str) -> None:
    """Print a line of talk. Where nobody listens any more, because the terminal was closed, what is going on goes on."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201  # this is the place that prints


def coloured(stream: int = 2) -> bool:
    """Return whether the stream with this file descriptor shows colours: a terminal, and NO_COLOR unset."""
    return os.isatty(stream) and "NO_COLOR" not in os.environ


@contextmanager
def progress(title: str, *, interrupted: str = "") -> Iterator[Say]:
    """Give a `say` for what goes on under `title`. On a terminal the newest line spins until the next one.

    `interrupted` is what a person who presses Ctrl-C meanwhile is told.
    """
    try:
        if coloured():
            with _spinner(title) as step:
                yield step
        else:
            say(title)
            yield lambda line: say(f"  {line}")
    except KeyboardInterrupt:
        if interrupted:
            say(f"interrupted: {interrupted}")
        raise


@contextmanager
def _spinner(title: str) -> Iterator[Say]:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False)
    with console.status(escape(title)) as status:
        console.print(escape(title))

        def step(line: str) -> None:
            with contextlib.suppress(OSError):
                console.print(f"  {escape(line)}")
                status.update(escape(line))

        yield step


def confirm(question: str) -> bool | None:
    """Ask a person, who answers no by saying nothing; None if there is no terminal to ask at."""
    if not (os.isatty(0) and os.isatty(2)):
        return None
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201  # see say
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def show_error(error: SwarmtrainError) -> None:
    """Print `error: …` and `hint: …`; a ConfigError prints a pair for each problem."""
    for text, hint in error.told:
        _show(text, hint)


def show_finding(finding: Finding) -> None:
    """Print what a launcher's check found."""
    text = f"{finding.place}: {finding.message}"
    _show(text, finding.hint, word="error" if finding.fatal else "warning")


def _show(text: str, hint: str | None, *, word: str = "error") -> None:
    red, dim, off = (_RED, _DIM, _OFF) if coloured() else ("", "", "")
    say(f"{red}{word}:{off} {text}")
    if hint:
        say(f"{dim}hint:{off} {hint}")
