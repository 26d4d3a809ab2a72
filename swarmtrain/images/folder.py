"""The files of a folder that may go into an image: all but what its .dockerignore names, packed the same way each time."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

IGNORE = ".dockerignore"
# Made anew wherever it is missing, of no use in a container, or what `image build` prepared.
_NEVER = ("**/__pycache__", "**/.git", IGNORE, "build/wheels", "build/extra", "build/package")

Entry = tuple[str, Path]
"""The name that something has in an archive, and where it lies."""


def files(folder: Path, *, deep: bool = True) -> list[Entry]:
    """Return the files and links in `folder`, by their names in it, sorted, and those in its folders too if `deep`.

    What its .dockerignore excludes is left out.
    """
    ignored = Ignore([*_lines(folder / IGNORE), *_NEVER])
    return sorted(_below(folder, "", ignored, deep))


def digest(entries: Iterable[Entry]) -> str:
    """Return 12 hexadecimal digits that differ if the names, contents or permissions of `entries` do."""
    total = hashlib.sha256()
    for name, path in entries:
        is_link = path.is_symlink()
        content = os.fsencode(path.readlink()) if is_link else path.read_bytes()
        kind = "link" if is_link else oct(_mode(path.stat().st_mode))
        total.update(f"{name}\0{kind}\0{hashlib.sha256(content).hexdigest()}\n".encode())
    return total.hexdigest()[:12]


def pack(archive: tarfile.TarFile, entries: Iterable[Entry], *, open_to_all: str = "") -> None:
    """Add `entries`, and the folders that they are in, to `archive` without owners and times: they may not spoil a cache.

    Into the folder `open_to_all` whoever runs the image may write, as into /tmp.
    """
    made: set[str] = set()
    for name, path in entries:
        for parent in reversed([str(parent) for parent in Path(name).parents if str(parent) != "."]):
            if parent not in made:
                made.add(parent)
                archive.addfile(_folder(parent, 0o1777 if parent == open_to_all else 0o755))
        archive.add(path, name, recursive=False, filter=_anonymous)


def pack_text(archive: tarfile.TarFile, name: str, text: str) -> None:
    """Add a file with this content to `archive`."""
    entry = tarfile.TarInfo(name)
    entry.size = len(text.encode())
    archive.addfile(_anonymous(entry), io.BytesIO(text.encode()))


class Ignore:
    """The patterns of a .dockerignore, with Docker's own meaning: the last one that fits a path, or a folder above it, decides."""

    def __init__(self, lines: Sequence[str]) -> None:
        patterns = [line.strip() for line in lines]
        self._rules = [(_regex(line.removeprefix("!")), not line.startswith("!")) for line in patterns if line and line[0] != "#"]
        self.exceptions = any(not excludes for _, excludes in self._rules)

    def excludes(self, name: str) -> bool:
        """Return whether the file or folder `name`, a path from the folder's top, is left out."""
        out = False
        for pattern, excludes in self._rules:
            if pattern.match(name):
                out = excludes
        return out


def _below(folder: Path, prefix: str, ignored: Ignore, deep: bool) -> Iterator[Entry]:
    for entry in os.scandir(folder):
        name = f"{prefix}{entry.name}"
        out = ignored.excludes(name)
        if entry.is_dir(follow_symlinks=False):
            # An exception may bring back what is deeper down.
            if deep and (not out or ignored.exceptions):
                yield from _below(Path(entry), f"{name}/", ignored, deep)
        elif not out and (entry.is_symlink() or entry.is_file()):
            yield name, Path(entry)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def _regex(pattern: str) -> re.Pattern[str]:
    """Return what matches the paths that `pattern` means, and all below them."""
    parts = re.split(r"(\*\*/?|\*|\?|\[[^]]*\])", os.path.normpath(pattern.strip()).lstrip("/"))
    meanings = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(meanings.get(part, part if part.startswith("[") else re.escape(part)) for part in parts) + r"(?:/.*)?\Z", re.DOTALL
    )


def _folder(name: str, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.DIRTYPE
    _anonymous(entry).mode = mode
    return entry


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    entry.mode = 0o755 if entry.isdir() else _mode(entry.mode)
    return entry


def _mode(mode: int) -> int:
    return 0o755 if mode & stat.S_IXUSR else 0o644
