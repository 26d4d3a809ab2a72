"""Spec and state of a process under a process keeper: two small JSON files, NODE.spec and NODE.state."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ProcessSpec:
    """Spec of a process that a process keeper runs.

    `content_digest` identifies the files that it reads: with other content, it is another process.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    content_digest: str
    cleanup_command: list[str] = field(default_factory=list)
    """Command that removes leftovers: run if `prepare_command` fails, and after the process has ended for good."""
    prepare_command: list[str] = field(default_factory=list)
    """Command that is run before each start and never interrupted: objects that it requests are created even if nobody waits for them."""
    stop_command: list[str] = field(default_factory=list)
    """Command that requests the process to stop; needed if SIGTERM to `argv` would not reach the process."""

    def save(self, path: Path) -> None:
        """Write the spec to `path`, readable by its owner only: it contains the user's environment."""
        write_atomically(path, json.dumps(asdict(self), indent=1), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> ProcessSpec:
        """Return the spec in the file at `path`. Raises OSError, ValueError or TypeError if it cannot be read."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ProcessState:
    """State of a process under a process keeper, in Swarm's terms: running, complete, failed (about to be restarted), shutdown."""

    keeper_pid: int
    state: str
    exit_code: int | None = None
    restarts: int = 0


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write `text` to `path` atomically, by renaming: a reader sees either the old or the new content.

    The file has the permissions `mode`.
    """
    write_bytes_atomically(path, text.encode(), mode=mode)


def write_bytes_atomically(path: Path, content: bytes, *, mode: int) -> None:
    """Write `content` to `path` atomically, by renaming. The file has the permissions `mode` when it is created."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)
