"""The cargo of a run: the script, the files of runner.code and the secrets, read once, when the run is deployed."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from swarmtrain.cargo.code_files import list_code_files
from swarmtrain.config import Config
from swarmtrain.config.user_files import UnreadableFileError, read_file_with_limit
from swarmtrain.errors import SwarmtrainError
from swarmtrain.notifications.channel import CHANNEL_SECRET_PREFIX, check_secret, name_channel_secret

_MAX_FILE_BYTES = 64_000_000
_CHANNEL_HINT = "docs/how-to/notify.md shows the file of each type of channel; swarmtrain notify-test sends a test notification"
_BUILT_IN_TRAINER_CALLS, _BUILT_IN_TRAINER_PACKAGE = (b"prepare_training(", b"train_model("), b"swarmtrain"


@dataclass(frozen=True)
class RunFile:
    """A file that is shipped with the run. `name` is its path in the folder of the shipped files, `digest` is a hash of its content."""

    name: str
    content: bytes
    digest: str

    @classmethod
    def from_content(cls, name: str, content: bytes) -> RunFile:
        """Return the RunFile for `name` and `content`. Its digest is the first 10 hexadecimal digits of the SHA-256."""
        return cls(name, content, hashlib.sha256(content).hexdigest()[:10])


@dataclass(frozen=True)
class Cargo:
    """Cargo of a run: the contents of the files to which the config refers. The script comes first, the other code files by name."""

    code: tuple[RunFile, ...]
    secrets: tuple[RunFile, ...] = ()
    """The secrets in runner.secrets, by their names there, and those of the channels in notify, as name_channel_secret names them."""

    @property
    def node_secrets(self) -> tuple[RunFile, ...]:
        """The secrets that the nodes receive."""
        return tuple(item for item in self.secrets if not item.name.startswith(CHANNEL_SECRET_PREFIX))

    @property
    def channel_secrets(self) -> tuple[RunFile, ...]:
        """The secrets that only the coordinator receives."""
        return tuple(item for item in self.secrets if item.name.startswith(CHANNEL_SECRET_PREFIX))

    @property
    def digest(self) -> str:
        """First 10 hexadecimal digits of a hash of the names and contents of the files that the nodes receive."""
        return _compute_digest((*self.code, *self.node_secrets))

    @property
    def channel_digest(self) -> str:
        """Such a hash of the files that only the coordinator receives; empty if there are none."""
        return _compute_digest(self.channel_secrets) if self.channel_secrets else ""

    @property
    def calls_built_in_trainer(self) -> bool:
        """Whether a code file calls the built-in trainer, which the config's topology and batch sizes are for; True without code files."""
        return not self.code or any(
            any(call in file.content for call in _BUILT_IN_TRAINER_CALLS) and _BUILT_IN_TRAINER_PACKAGE in file.content
            for file in self.code
        )


def _compute_digest(files: Iterable[RunFile]) -> str:
    lines = [f"{item.name}\0{item.digest}\n" for item in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:10]


def read_cargo(config: Config, folder: Path) -> Cargo:
    """Read the files to which `config` refers, with paths relative to `folder`.

    An empty code file is shipped as a line feed, because Swarm does not accept empty files. Raises SwarmtrainError if a file cannot be
    read.
    """
    code = tuple(
        RunFile.from_content(file.name, _read_run_file(file.path, file.config_key) or b"\n") for file in list_code_files(config, folder)
    )
    secrets = tuple(
        RunFile.from_content(name, _read_run_file(folder / path, f"runner.secrets.{name}"))
        for name, path in sorted(config.runner.secrets.items())
    )
    return Cargo(code, (*secrets, *read_channel_secrets(config, folder)))


def read_channel_secrets(config: Config, folder: Path) -> Iterator[RunFile]:
    """Yield the secrets of the channels in `config`, with paths relative to `folder`.

    Raises SwarmtrainError if one cannot be read or is malformed; its message contains nothing of the file's content.
    """
    for name, channel in sorted(config.notify.items()):
        config_key = f"notify.{name}.secret"
        content = _read_run_file(folder / channel.secret, config_key)
        try:
            check_secret(channel.type, content)
        except ValueError as error:
            raise SwarmtrainError(f"{folder / channel.secret}: {error}", place=f"config {config_key}", hint=_CHANNEL_HINT) from None
        yield RunFile.from_content(name_channel_secret(name), content)


def _read_run_file(path: Path, config_key: str) -> bytes:
    try:
        return read_file_with_limit(path, _MAX_FILE_BYTES)
    except UnreadableFileError as error:
        hint = "use a path relative to the current folder" if error.errno == errno.ENOENT else f"ls -l {path} shows what it is"
        raise SwarmtrainError(f"{path}: {error}", place=f"config {config_key}", hint=hint) from None
