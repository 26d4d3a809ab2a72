"""Texts for a model, wherever they are written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from swarmtrain.config.files import reason
from swarmtrain.errors import SwarmtrainError


def read(given: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts `given`, and those in `file`, one a line; standard input if there are none. Raises SwarmtrainError."""
    found = [*given, *(line for line in _lines(file, "--prompts", "prompt") if line)]
    if not found and not file and not sys.stdin.isatty():
        found = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
    if not found:
        raise SwarmtrainError("there is no prompt", place="sample", hint="--prompt 'Once upon a time'")
    return found


def read_texts(given: Sequence[str], file: Path | None) -> list[str]:
    """Return the texts `given`, and those in `file`, one a line; those of standard input if there are none. Raises SwarmtrainError.

    An empty line is an error: what comes of texts has a row for each.
    """
    lines = _lines(file, "--texts", "text")
    if not given and not file and not sys.stdin.isatty():
        lines = sys.stdin.read().splitlines()
    if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        raise SwarmtrainError(f"line {empty[0]} is empty", place=str(file or "standard input"), hint="a text a line")
    if not (given or lines):
        raise SwarmtrainError("there is no text", place="embed", hint="--text 'Once upon a time'")
    return [*given, *lines]


def _lines(file: Path | None, option: str, what: str) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines() if file else []
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "is not text"
        raise SwarmtrainError(why, place=str(file), hint=f"{option} names a file with a {what} a line") from None
