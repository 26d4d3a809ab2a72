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


def add_entries_to_archive(archive: tarfile.TarFile, entries: Iterable[FolderEntry], *, world_writable_folder: str = "") -> None:
    """Add `entries` and their parent folders to `archive`, without owners and modification times, which would invalidate the build cache.

    `world_writable_folder` is added with mode 1777, as /tmp has: any user that the image runs as can write to it.
    """
    paths = dict(entries)
    add_folder_entries(archive, paths, world_writable_folder=world_writable_folder)
    for name, path in paths.items():
        archive.add(path, name, recursive=False, filter=_anonymize_tar_entry)


def add_folder_entries(archive: tarfile.TarFile, names: Iterable[str], *, world_writable_folder: str = "") -> None:
    """Add the parent folders of the files `names` to `archive`; see `add_entries_to_archive`."""
    added_folders: set[str] = set()
    for name in names:
        for parent in reversed([str(parent) for parent in Path(name).parents if str(parent) != "."]):
            if parent not in added_folders:
                added_folders.add(parent)
                archive.addfile(_create_folder_entry(parent, 0o1777 if parent == world_writable_folder else 0o755))


def add_file_content(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Add a file `name` with `content` to `archive`."""
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(_anonymize_tar_entry(entry), io.BytesIO(content))


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
