"""Read prompts and texts for a model from arguments, files and standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from swarmtrain.config.user_files import describe_os_error, read_regular_file
from swarmtrain.errors import SwarmtrainError


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts in `arguments` and in `file` (one per line). If neither is passed, standard input is read as one prompt.

    Raises SwarmtrainError if there is no prompt, or `file` cannot be read.
    """
    prompts = [*arguments, *(line for line in _read_file_lines(file, "--prompts", "prompt") if line)]
    if not prompts and not file and not sys.stdin.isatty():
        prompts = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
    if not prompts:
        raise SwarmtrainError("there is no prompt", place="sample", hint="pass --prompt 'Once upon a time'")
    return prompts


def read_texts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Return the texts in `arguments` and in `file` (one per line). If neither is passed, each line of standard input is one text.

    Raises SwarmtrainError if there is no text, `file` cannot be read, or a line is empty (the output has one row per text).
    """
    lines = _read_file_lines(file, "--texts", "text")
    if not arguments and not file and not sys.stdin.isatty():
        lines = sys.stdin.read().splitlines()
    if empty := [number for number, line in enumerate(lines, 1) if not line.strip()]:
        raise SwarmtrainError(f"line {empty[0]} is empty", place=str(file or "standard input"), hint="write one text per line")
    if not (arguments or lines):
        raise SwarmtrainError("there is no text", place="embed", hint="pass --text 'Once upon a time'")
    return [*arguments, *lines]


def _read_file_lines(file: Path | None, option: str, item_noun: str) -> list[str]:
    try:
        return read_regular_file(file).decode().splitlines() if file else []
    except (OSError, UnicodeDecodeError) as error:
        message = describe_os_error(error) if isinstance(error, OSError) else "is not text"
        raise SwarmtrainError(message, place=str(file), hint=f"{option} needs a text file with one {item_noun} per line") from None
