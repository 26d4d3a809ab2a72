"""The files that a person names: read whole and at once, never from what has no end; written all together or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

OPEN, SECRET = 0o644, 0o600
"""Modes of files."""


class Unreadable(Exception):
    """A file cannot be read; the text says why and fits behind the file's name and a colon.

    `number` is the system's own of the error (errno), 0 if the system did not refuse.
    """

    def __init__(self, why: str, number: int = 0) -> None:
        super().__init__(why)
        self.number = number


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
        raise Unreadable(reason(error), error.errno or 0) from None
    if len(content) > most:
        raise Unreadable(f"is {max(facts.st_size, len(content)) / 1e6:.1f} MB; at most {most / 1e6:g} MB are read")
    return content


def write_all(files: Mapping[Path, tuple[bytes, int]]) -> None:
    """Write `files`, each a content and a mode, in this order. Raises OSError, having changed nothing.

    They are written aside first, for a full disk shows itself then, and renamed into place when all are there. A file is
    readable as its mode says from its first byte on.
    """
    for path in files:
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "it is a folder or a device")
    asides = {path: path.with_name(f".{path.name}.new") for path in files}
    made = {folder for path in files for folder in _missing(path.parent)}
    try:
        for path, (content, mode) in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            asides[path].unlink(missing_ok=True)
            with os.fdopen(os.open(asides[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
    except BaseException:
        for undo in (*(aside.unlink for aside in asides.values()), *(folder.rmdir for folder in sorted(made, reverse=True))):
            with contextlib.suppress(OSError):
                undo()
        raise
    for path, aside in asides.items():
        aside.replace(path)


def reason(error: OSError) -> str:
    """Return why the system refused, in words that fit behind a file's name."""
    known = {errno.ENOENT: "no such file", errno.EACCES: "permission denied", errno.ENOTDIR: "part of the path is a file, not a folder"}
    return known.get(error.errno or 0) or (error.strerror or str(error)).lower()


def _missing(folder: Path) -> Iterator[Path]:
    while not folder.exists():
        yield folder
        folder = folder.parent
