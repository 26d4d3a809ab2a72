"""Pack the files of a folder into a reproducible tar archive, and compute their digest."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Iterable
from pathlib import Path

from swarmtrain.cargo.docker_ignore import FolderEntry


def compute_entries_digest(entries: Iterable[FolderEntry]) -> str:
    """Return a digest of `entries`, 12 hexadecimal digits, which changes with their names, contents or permissions."""
    sha256 = hashlib.sha256()
    for name, path in entries:
        is_link = path.is_symlink()
        content = os.fsencode(path.readlink()) if is_link else path.read_bytes()
        kind = "link" if is_link else oct(_normalize_file_mode(path.stat().st_mode))
        sha256.update(f"{name}\0{kind}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return sha256.hexdigest()[:12]


def add_files_to_archive(archive: tarfile.TarFile, files: Iterable[tuple[str, Path | bytes]], *, world_writable_folder: str = "") -> None:
    """Add `files`, by name, and their parent folders to `archive`. A file is a path on this machine, or its content.

    Owners and modification times are left out, since they would invalidate the build cache. `world_writable_folder` is added with mode
    1777, as /tmp has: any user that the image runs as can write to it.
    """
    added_folders = {"."}
    for name, file in files:
        for parent in reversed([str(parent) for parent in Path(name).parents]):
            if parent not in added_folders:
                added_folders.add(parent)
                archive.addfile(_create_folder_entry(parent, 0o1777 if parent == world_writable_folder else 0o755))
        if isinstance(file, bytes):
            entry = tarfile.TarInfo(name)
            entry.size = len(file)
            archive.addfile(_anonymize_tar_entry(entry), io.BytesIO(file))
        else:
            archive.add(file, name, recursive=False, filter=_anonymize_tar_entry)


def _create_folder_entry(name: str, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.DIRTYPE
    _anonymize_tar_entry(entry).mode = mode
    return entry


def _anonymize_tar_entry(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o755 if entry.isdir() else _normalize_file_mode(entry.mode)
    return entry


def _normalize_file_mode(mode: int) -> int:
    return 0o755 if mode & stat.S_IXUSR else 0o644
