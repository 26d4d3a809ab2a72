"""List the files of a folder that its .dockerignore does not exclude, with Docker's semantics."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

IGNORE_FILE = ".dockerignore"
# Files that are regenerated if missing, are useless in a container, or are added by `image build` itself.
_ALWAYS_IGNORED = ("**/__pycache__", "**/.git", IGNORE_FILE, "build/wheels", "build/extra", "build/package")

FolderEntry = tuple[str, Path]
"""Path of a file relative to the listed folder, with forward slashes, and the path of the file."""


def list_files(folder: Path, *, recursive: bool = True) -> list[FolderEntry]:
    """Return the files and symlinks in `folder` (if `recursive`, also in its subfolders), sorted by their relative names.

    Files that the folder's .dockerignore excludes are skipped.
    """
    return sorted(_iterate_files(folder, "", DockerIgnore.read_from_folder(folder), recursive))


class DockerIgnore:
    """The patterns of a .dockerignore with Docker's semantics: the last one that matches a path, or one of its parent folders, decides."""

    def __init__(self, lines: Sequence[str]) -> None:
        patterns = [line.strip() for line in lines]
        self._rules = [
            (_compile_ignore_pattern(line.removeprefix("!")), not line.startswith("!")) for line in patterns if line and line[0] != "#"
        ]
        self.has_exceptions = any(not excludes for _, excludes in self._rules)

    @classmethod
    def read_from_folder(cls, folder: Path) -> DockerIgnore:
        """Return the patterns of the .dockerignore in `folder`, if there is one, and those that always apply."""
        return cls([*_read_ignore_lines(folder / IGNORE_FILE), *_ALWAYS_IGNORED])

    def is_excluded(self, name: str) -> bool:
        """Return whether the file or folder `name`, a path relative to the folder's root, is excluded."""
        is_out = False
        for pattern, excludes in self._rules:
            if pattern.match(name):
                is_out = excludes
        return is_out


def _iterate_files(folder: Path, prefix: str, dockerignore: DockerIgnore, recursive: bool) -> Iterator[FolderEntry]:
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
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []


def _compile_ignore_pattern(pattern: str) -> re.Pattern[str]:
    """Return a regular expression for the paths that `pattern` matches, and everything below them."""
    tokens = re.split(r"(\*\*/?|\*|\?|\[[^]]*\])", os.path.normpath(pattern.strip()).lstrip("/"))
    regexes = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(regexes.get(token, token if token.startswith("[") else re.escape(token)) for token in tokens) + r"(?:/.*)?\Z", re.DOTALL
    )
