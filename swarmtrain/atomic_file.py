"""Write files atomically, and create files and folders that only their owner can read.

A reader of an atomically written file, also on another machine, sees either the old or the new content.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

PUBLIC_MODE, SECRET_MODE = 0o644, 0o600
"""File modes of files without and with secrets."""
_PRIVATE_FOLDER_MODE = 0o700


def write_text_atomically(path: Path, text: str, *, mode: int = PUBLIC_MODE) -> None:
    """Write `text` to `path` atomically, by renaming a temporary file: a reader sees either the old or the new content.

    The file is created with the permissions `mode`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(text.encode())
    temporary.replace(path)


def write_files_atomically(files: Mapping[Path, tuple[bytes, int]]) -> None:
    """Write all `files` or none: a mapping of path to content and mode, written in this order.

    The contents are first written to staging files, so that a full disk is detected before any file changes. When all are complete, they
    are renamed to their final paths.
    Each file is created with its final mode. Raises OSError if one cannot be written; then no file has changed.
    """
    for path in files:
        if path.exists() and not path.is_file():
            raise FileExistsError(errno.EEXIST, "it is a folder or a device")
    staging_paths = {path: path.with_name(f".{path.name}.new") for path in files}
    created_folders = {folder for path in files for folder in _iterate_missing_parents(path.parent)}
    try:
        for path, (content, mode) in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            staging_paths[path].unlink(missing_ok=True)
            with os.fdopen(os.open(staging_paths[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
    except BaseException:
        for cleanup in (
            *(staging_path.unlink for staging_path in staging_paths.values()),
            *(folder.rmdir for folder in sorted(created_folders, reverse=True)),
        ):
            with contextlib.suppress(OSError):
                cleanup()
        raise
    for path, staging_path in staging_paths.items():
        staging_path.replace(path)


def open_private_file(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open `path` like `open`, as UTF-8 if `mode` is a text mode. A file that does not exist is created with the permissions 0600."""
    return open(  # Path.open has no opener
        path,
        mode,
        buffering,
        encoding=None if "b" in mode else "utf-8",
        opener=lambda name, flags: os.open(name, flags, SECRET_MODE),
    )


def create_private_folder(path: Path) -> None:
    """Create the folder `path` and its missing parents, with the permissions 0700.

    If `path` exists, other users lose their permissions to read it. A folder that other users may write to is left unchanged, because its
    owner shares it on purpose. Raises OSError if it cannot be created.
    """
    for folder in reversed([folder for folder in (path, *path.parents) if not folder.exists()]):
        folder.mkdir(mode=_PRIVATE_FOLDER_MODE, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077 and not mode & 0o022:
        with contextlib.suppress(PermissionError):  # the folder belongs to another user
            path.chmod(_PRIVATE_FOLDER_MODE)


def _iterate_missing_parents(folder: Path) -> Iterator[Path]:
    while not folder.exists():
        yield folder
        folder = folder.parent
