"""Write files atomically: a reader, also on another machine, sees either the old or the new content."""

from __future__ import annotations

import os
from pathlib import Path


def write_text_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write `text` to `path` atomically, by renaming a temporary file: a reader sees either the old or the new content.

    The file is created with the permissions `mode`.
    """
    write_bytes_atomically(path, text.encode(), mode=mode)


def write_bytes_atomically(path: Path, content: bytes, *, mode: int) -> None:
    """Write `content` to `path` atomically, by renaming a temporary file. The file is created with the permissions `mode`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)
