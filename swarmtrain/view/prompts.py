"""What a model is to go on from, wherever it is written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from swarmtrain.config.files import reason
from swarmtrain.errors import SwarmtrainError


def read(given: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts `given`, and those in `file`, one a line; standard input if there are none. Raises SwarmtrainError."""
    found = [*given, *(_lines(file) if file else ())]
    if not found and not file and not sys.stdin.isatty():
        found = [text] if (text := sys.stdin.read().removesuffix("\n")) else []
    if not found:
        raise SwarmtrainError("there is no prompt", place="sample", hint="--prompt 'Once upon a time'")
    return found


def _lines(file: Path) -> list[str]:
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "is not text"
        raise SwarmtrainError(why, place=str(file), hint="--prompts names a file with a prompt a line") from None
