"""Messages on stderr: progress with a spinner on a terminal and as plain lines elsewhere, and errors with hints."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmtrain.errors import SwarmtrainError

if TYPE_CHECKING:
    from swarmtrain.launchers.base import Finding, ProgressReporter

_RED, _DIM, _RESET = "\033[31m", "\033[2m", "\033[0m"


def print_message(line: str) -> None:
    """Print a message on stderr. If the terminal was closed, ignore the error, so that the current operation continues."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201  # this is the place that prints


def has_color_support(stream: int = 2) -> bool:
    """Return whether the file descriptor `stream` supports colors: it is a terminal, and NO_COLOR is unset."""
    return os.isatty(stream) and "NO_COLOR" not in os.environ


@contextmanager
def show_progress(title: str, *, interrupt_hint: str = "") -> Iterator[ProgressReporter]:
    """Yield a progress reporter for the operation `title`.

    On a terminal, a spinner is shown with the newest progress message. `interrupt_hint` is printed if the user presses Ctrl-C meanwhile.
    """
    try:
        if has_color_support():
            with _show_spinner(title) as report_progress:
                yield report_progress
        else:
            print_message(title)
            yield lambda line: print_message(f"  {line}")
    except KeyboardInterrupt:
        if interrupt_hint:
            print_message(f"interrupted: {interrupt_hint}")
        raise


@contextmanager
def _show_spinner(title: str) -> Iterator[ProgressReporter]:
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True, highlight=False)
    with console.status(escape(title)) as status:
        console.print(escape(title))

        def report_progress(line: str) -> None:
            with contextlib.suppress(OSError):
                console.print(f"  {escape(line)}")
                status.update(escape(line))

        yield report_progress


def ask_confirmation(question: str) -> bool | None:
    """Ask the user a yes/no question and return the answer; an empty answer means no. Return None if stdin or stderr is not a terminal."""
    if not (os.isatty(0) and os.isatty(2)):
        return None
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201  # see print_message
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def show_error(error: SwarmtrainError) -> None:
    """Print `error: …` and `hint: …` for the error; for a ConfigError, a pair of lines for each problem."""
    for text, hint in error.messages_with_hints:
        _print_labeled_text(text, hint)


def show_finding(finding: Finding) -> None:
    """Print a finding of a launcher's plan check as `error: …` or `warning: …`, with its hint."""
    text = f"{finding.place}: {finding.message}"
    _print_labeled_text(text, finding.hint, label="error" if finding.fatal else "warning")


def _print_labeled_text(text: str, hint: str | None, *, label: str = "error") -> None:
    red, dim, reset = (_RED, _DIM, _RESET) if has_color_support() else ("", "", "")
    print_message(f"{red}{label}:{reset} {text}")
    if hint:
        print_message(f"{dim}hint:{reset} {hint}")
