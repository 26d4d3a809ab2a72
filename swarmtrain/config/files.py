"""Reading the files that a person names: whole and at once, and never from what is no file or has no end."""

from __future__ import annotations

import errno
import stat
from pathlib import Path


class Unreadable(Exception):
    """A file cannot be read; the text says why and fits behind the file's name and a colon."""


def read(path: Path, most: int) -> bytes:
    """Return what the file at `path` holds. Raises Unreadable, also if it is no regular file or over `most` bytes."""
    try:
        facts = path.stat()
        if stat.S_ISDIR(facts.st_mode):
            raise Unreadable("is a folder, not a file")
        if not stat.S_ISREG(facts.st_mode):
            raise Unreadable("is a pipe or a device, not a file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except OSError as error:
        raise Unreadable(reason(error)) from None
    if len(content) > most:
        raise Unreadable(f"is {max(facts.st_size, len(content)) / 1e6:.1f} MB; at most {most / 1e6:g} MB are read")
    return content


def reason(error: OSError) -> str:
    """Return why the system refused, in words that fit behind a file's name."""
    known = {errno.ENOENT: "no such file", errno.EACCES: "permission denied", errno.ENOTDIR: "what should be its folder is a file"}
    return known.get(error.errno or 0) or (error.strerror or str(error)).lower()
