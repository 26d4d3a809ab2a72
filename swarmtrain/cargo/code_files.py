"""List the code files of a run: the script, and the files, folders and patterns in runner.code."""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from swarmtrain.cargo.docker_ignore import DockerIgnore, FolderEntry, list_files
from swarmtrain.config import Config
from swarmtrain.config.user_files import get_shipped_name
from swarmtrain.errors import PlanError, ProcessError
from swarmtrain.process import run_command

_MAX_FILES, _MAX_BYTES = 5000, 200_000_000
_GIT_TIMEOUT_SECONDS = 60.0
# Files of a folder that are never code: keys, passwords and tokens under their usual names, and what `swarmtrain generate` writes.
_SECRET_FILES = (
    *(".env", ".env.*", ".netrc", ".git-credentials", ".pypirc", ".npmrc", "kaggle.json", ".ssh", ".aws"),
    *("*.pem", "*.key", "*.p12", "*.pfx", "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519"),
)
_NEVER_SHIPPED = DockerIgnore([*(f"**/{name}" for name in _SECRET_FILES), "compose/generated*"])
_CACHES = DockerIgnore(["**/__pycache__"])
_VENV_MARKER_FILE = "pyvenv.cfg"
_CODE_KEY = "runner.code"


@dataclass(frozen=True)
class CodeFile:
    """A code file: its `name`, which is its path in the folder of the shipped files, its path on this machine, and its config key."""

    name: str
    path: Path
    config_key: str


def list_code_files(config: Config, working_folder: Path) -> list[CodeFile]:
    """Return the code files of `config`, whose paths are relative to `working_folder`: the script first, the others by name.

    A relative path is kept; a file or folder with an absolute path, or a path with `..`, is put at the top under its base name. Of a
    folder, the files that git or the folder's own .dockerignore ignores are skipped, and the folders to which the run writes. Raises
    PlanError if a folder or a pattern has no files, if two files have the same name, or if there are too many files or bytes.
    """
    runner = config.runner
    files = [] if runner.module else [CodeFile(runner.script_name, working_folder / runner.script, "runner.script")]
    skipped_paths = _list_skipped_paths(config, working_folder)
    for entry in runner.code:
        files += [CodeFile(name, path, _CODE_KEY) for name, path in _expand_entry(entry, working_folder, skipped_paths)]
    unique_files = _remove_repetitions(files)
    _check_size(unique_files)
    return sorted(unique_files, key=lambda file: (file.config_key == _CODE_KEY, file.name))


def _list_skipped_paths(config: Config, working_folder: Path) -> frozenset[Path]:
    """Return the files and folders below the working folder that a folder in runner.code does not include."""
    runner, trainer = config.runner, config.trainer
    secrets = [*runner.secrets.values(), *(channel.secret for channel in config.notify.values())]
    configured_paths = [trainer.save_dir, config.logger.log_dir, runner.hostsfile, runner.env_file, *secrets]
    resolved_paths = {(working_folder / path).resolve() for path in configured_paths if path is not None}
    return frozenset(resolved_paths - {working_folder.resolve(), *working_folder.resolve().parents})


def _expand_entry(entry: Path, working_folder: Path, skipped_paths: frozenset[Path]) -> Iterator[FolderEntry]:
    path = working_folder / entry
    if os.path.isdir(path):  # noqa: PTH112  # Path.is_dir raises an error for a path that is too long, or that may not be looked up
        yield from _list_folder_entry(entry, working_folder, skipped_paths)
    elif not glob.has_magic(str(entry)) or path.exists():
        yield get_shipped_name(entry), path
    else:
        yield from _list_matches(entry, working_folder)


def _list_folder_entry(entry: Path, working_folder: Path, skipped_paths: frozenset[Path]) -> list[FolderEntry]:
    prefix, folder = PurePosixPath(get_shipped_name(entry)), working_folder / entry
    files = []
    for name, path in _list_folder(folder):
        shipped_name = str(prefix / name)
        resolved_path = path.resolve()
        is_skipped = _NEVER_SHIPPED.is_excluded(shipped_name) or not skipped_paths.isdisjoint((resolved_path, *resolved_path.parents))
        if not is_skipped and path.is_file():  # not a link to a folder or to a missing file
            files.append((shipped_name, path))
    if not files:
        raise PlanError(
            f"{entry}: has no files, or git or its .dockerignore ignores all of them", place=f"config {_CODE_KEY}", hint=f"ls -A {entry}"
        )
    return files


def _list_folder(folder: Path) -> list[FolderEntry]:
    """Return the files of `folder` by their names below it, without those that git or the folder's .dockerignore ignores."""
    if any((parent / ".git").exists() for parent in (folder.resolve(), *folder.resolve().parents)) and (
        entries := _list_files_with_git(folder)
    ):
        dockerignore = DockerIgnore.read_from_folder(folder)
        return [(name, path) for name, path in entries if not dockerignore.is_excluded(name)]
    entries = list_files(folder)
    venvs = {str(PurePosixPath(name).parent) for name, path in entries if path.name == _VENV_MARKER_FILE}
    return [(name, path) for name, path in entries if venvs.isdisjoint(map(str, PurePosixPath(name).parents))]


def _list_files_with_git(folder: Path) -> list[FolderEntry]:
    """Return the tracked and untracked files of a folder in a git worktree; empty if git ignores the folder itself."""
    # Reading a worktree must neither change it nor run a program that its git config names.
    options = ["--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]
    try:
        output = run_command(
            ["git", *options, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"], timeout=_GIT_TIMEOUT_SECONDS
        )
    except ProcessError as error:
        raise PlanError(
            f"{folder}: the folder is in a git worktree, but git cannot list its files: {error.message}",
            place=f"config {_CODE_KEY}",
            hint="install git, or list files or patterns such as src/**/*.py instead of the folder",
        ) from None
    entries: list[FolderEntry] = []
    for name in filter(None, output.split("\0")):
        path = folder / name
        if path.is_dir() and not path.is_symlink():  # a submodule, or another worktree in this one
            entries += [(f"{name.rstrip('/')}/{sub_name}", sub_path) for sub_name, sub_path in _list_folder(path)]
        else:
            entries.append((name, path))
    return entries


def _list_matches(pattern: Path, working_folder: Path) -> list[FolderEntry]:
    matches = sorted(glob.glob(str(pattern), root_dir=working_folder, recursive=True))  # noqa: PTH207  # the pattern may be absolute
    files = [match for match in matches if (working_folder / match).is_file() and not _CACHES.is_excluded(match)]
    if not files:
        raise PlanError(
            f"{pattern}: the pattern matches no file in {working_folder}",
            place=f"config {_CODE_KEY}",
            hint="** matches any number of folders",
        )
    return [(get_shipped_name(Path(match)), working_folder / match) for match in files]


def _remove_repetitions(files: Sequence[CodeFile]) -> list[CodeFile]:
    """Return `files` without those that are listed twice. Raises PlanError if two different files have the same name."""
    unique_files: dict[str, CodeFile] = {}
    for file in files:
        first = unique_files.setdefault(file.name, file)
        if first.path.resolve() != file.path.resolve():
            raise PlanError(
                f"{first.path} and {file.path} would both be shipped as {file.name}",
                place=f"config {_CODE_KEY}",
                hint="use relative paths, which are kept, or rename one of the two",
            )
    return list(unique_files.values())


def _check_size(files: Sequence[CodeFile]) -> None:
    bytes_by_folder: Counter[str] = Counter()
    for file in files:
        bytes_by_folder[file.name.partition("/")[0]] += _get_file_size(file.path)
    total_bytes = sum(bytes_by_folder.values())
    if len(files) <= _MAX_FILES and total_bytes <= _MAX_BYTES:
        return
    largest = ", ".join(f"{name} ({size / 1e6:.0f} MB)" for name, size in bytes_by_folder.most_common(3))
    raise PlanError(
        f"{len(files)} files of {total_bytes / 1e6:.0f} MB, but at most {_MAX_FILES} files of {_MAX_BYTES / 1e6:.0f} MB are shipped with a "
        f"run; the largest: {largest}",
        place=f"config {_CODE_KEY}",
        hint="list what the nodes do not need in .dockerignore, and mount data with runner.docker_config.docker_mounts",
    )


def _get_file_size(path: Path) -> int:
    """Return the size of the file at `path` in bytes; 0 if it cannot be read, which is an error when it is shipped."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
