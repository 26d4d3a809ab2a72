"""Read and write files that the user names.

Only regular files up to a size limit are read. Groups of files are written atomically.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO


class UnreadableFileError(Exception):
    """Raised if a file cannot be read. The message is the reason, without the file name.

    `errno` is the system's error number; 0 if the error is not from the operating system.
    """

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


def check_regular_file(path: Path) -> os.stat_result:
    """Return the status of the file at `path`. Raises OSError if it does not exist, or is a folder, a pipe or a device.

    To open a pipe would block until another process writes to it.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        number, kind = (errno.EISDIR, "folder") if stat.S_ISDIR(status.st_mode) else (errno.EINVAL, "pipe or a device")
        raise OSError(number, f"it is a {kind}, not a file", str(path))
    return status


def open_regular_file(path: Path, *, buffering: int = -1) -> IO[bytes]:
    """Open the file at `path` for reading. Raises OSError if it cannot be opened, or is a folder, a pipe or a device."""
    check_regular_file(path)
    return path.open("rb", buffering=buffering)


def read_regular_file(path: Path) -> bytes:
    """Return the content of the file at `path`. Raises OSError if it cannot be read, or is a folder, a pipe or a device."""
    with open_regular_file(path) as file:
        return file.read()


def read_file_with_limit(path: Path, max_bytes: int) -> bytes:
    """Return the content of the file at `path`.

    Raises UnreadableFileError if it cannot be read, is not a regular file, or exceeds `max_bytes`.
    """
    try:
        with open_regular_file(path) as file:
            stat_result, content = os.fstat(file.fileno()), file.read(max_bytes + 1)
    except OSError as error:
        raise UnreadableFileError(describe_os_error(error), error.errno or 0) from None
    if len(content) > max_bytes:
        raise UnreadableFileError(f"is {max(stat_result.st_size, len(content)) / 1e6:.1f} MB; the limit is {max_bytes / 1e6:g} MB")
    return content


def describe_os_error(error: OSError) -> str:
    """Return the reason of `error`, worded so that it fits after a file's name."""
    messages = {errno.ENOENT: "no such file", errno.EACCES: "permission denied", errno.ENOTDIR: "part of the path is a file, not a folder"}
    return messages.get(error.errno or 0) or (error.strerror or str(error)).lower()


def get_shipped_name(path: Path) -> str:
    """Return the path of a code file or folder in the folder with the files that are shipped with the run.

    A relative path is kept. A file with an absolute path, or with a path that contains `..`, is put at the top under its base name.
    """
    if path.is_absolute() or ".." in path.parts:
        return path.name if path.name not in ("", "..") else path.resolve().name
    return path.as_posix()
