"""List and pack the files of a folder that its .dockerignore does not exclude from an image. The tar archive is reproducible."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

IGNORE_FILE = ".dockerignore"
# Files that are regenerated if missing, are useless in a container, or are added by `image build` itself.
_ALWAYS_IGNORED = ("**/__pycache__", "**/.git", IGNORE_FILE, "build/wheels", "build/extra", "build/package")

ArchiveEntry = tuple[str, Path]
"""Name of an archive member, and the path of its file."""


def list_files(folder: Path, *, recursive: bool = True) -> list[ArchiveEntry]:
    """Return the files and symlinks in `folder` (if `recursive`, also in its subfolders), sorted by their relative names.

    Files that the folder's .dockerignore excludes are skipped.
    """
    dockerignore = DockerIgnore([*_read_ignore_lines(folder / IGNORE_FILE), *_ALWAYS_IGNORED])
    return sorted(_iterate_files(folder, "", dockerignore, recursive))


def compute_entries_digest(entries: Iterable[ArchiveEntry]) -> str:
    """Return a digest of `entries`, 12 hexadecimal digits, which changes with their names, contents or permissions."""
    sha256 = hashlib.sha256()
    for name, path in entries:
        is_link = path.is_symlink()
        content = os.fsencode(path.readlink()) if is_link else path.read_bytes()
        kind = "link" if is_link else oct(_normalize_file_mode(path.stat().st_mode))
        sha256.update(f"{name}\0{kind}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return sha256.hexdigest()[:12]


def add_entries_to_archive(archive: tarfile.TarFile, entries: Iterable[ArchiveEntry], *, world_writable_folder: str = "") -> None:
    """Add `entries` and their parent folders to `archive`, without owners and modification times, which would invalidate the build cache.

    `world_writable_folder` is added with mode 1777, as /tmp has: any user that the image runs as can write to it.
    """
    added_folders: set[str] = set()
    for name, path in entries:
        for parent in reversed([str(parent) for parent in Path(name).parents if str(parent) != "."]):
            if parent not in added_folders:
                added_folders.add(parent)
                archive.addfile(_create_folder_entry(parent, 0o1777 if parent == world_writable_folder else 0o755))
        archive.add(path, name, recursive=False, filter=_anonymize_tar_entry)


def add_text_entry(archive: tarfile.TarFile, name: str, text: str) -> None:
    """Add a file `name` with the content `text` to `archive`."""
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    archive.addfile(_anonymize_tar_entry(entry), io.BytesIO(text.encode()))


class DockerIgnore:
    """The patterns of a .dockerignore with Docker's semantics: the last one that matches a path, or one of its parent folders, decides."""

    def __init__(self, lines: Sequence[str]) -> None:
        patterns = [line.strip() for line in lines]
        self._rules = [
            (_compile_ignore_pattern(line.removeprefix("!")), not line.startswith("!")) for line in patterns if line and line[0] != "#"
        ]
        self.has_exceptions = any(not excludes for _, excludes in self._rules)

    def is_excluded(self, name: str) -> bool:
        """Return whether the file or folder `name`, a path relative to the folder's root, is excluded."""
        is_out = False
        for pattern, excludes in self._rules:
            if pattern.match(name):
                is_out = excludes
        return is_out


def _iterate_files(folder: Path, prefix: str, dockerignore: DockerIgnore, recursive: bool) -> Iterator[ArchiveEntry]:
    for entry in os.scandir(folder):
        name = f"{prefix}{entry.name}"
        is_out = dockerignore.is_excluded(name)
        if entry.is_dir(follow_symlinks=False):
            # A pattern with `!` may re-include paths below an excluded folder.
            if recursive and (not is_out or dockerignore.has_exceptions):
                yield from _iterate_files(Path(entry), f"{name}/", dockerignore, recursive)
        elif not is_out and (entry.is_symlink() or entry.is_file()):
            yield name, Path(entry)


def _read_ignore_lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def _compile_ignore_pattern(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for the paths that `pattern` matches, and everything below them."""
    tokens = re.split(r"(\*\*/?|\*|\?|\[[^]]*\])", os.path.normpath(pattern.strip()).lstrip("/"))
    regexes = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(regexes.get(token, token if token.startswith("[") else re.escape(token)) for token in tokens) + r"(?:/.*)?\Z", re.DOTALL
    )


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
