"""Spec and state of a kept process: two small JSON files, NODE.spec and NODE.state."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ProcessSpec:
    """Process to keep running. `content_digest` identifies the files that it reads: with other content it is a different process."""

    name: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    content_digest: str
    cleanup_command: list[str] = field(default_factory=list)
    """Run if `prepare_command` fails, since leftovers of an earlier process may be in its way, and after the process has ended for good."""
    prepare_command: list[str] = field(default_factory=list)
    """Run before each start, and never interrupted: what it requests is created even if nobody waits for it any more."""
    stop_command: list[str] = field(default_factory=list)
    """Run to request the process to stop, if SIGTERM to `argv` would not reach it."""

    def save(self, path: Path) -> None:
        """Write the spec to `path`, readable by its owner only: it contains the user's environment."""
        write_atomically(path, json.dumps(asdict(self), indent=1), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> ProcessSpec:
        """Read a spec back. Raises OSError, ValueError, TypeError."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class ProcessState:
    """State in Swarm's terms: running, complete, failed (about to be restarted), shutdown."""

    keeper_pid: int
    state: str
    exit_code: int | None = None
    restarts: int = 0


def write_atomically(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write `text` to `path` by rename, so that a reader finds either the complete old or the complete new content."""
    write_bytes_atomically(path, text.encode(), mode=mode)


def write_bytes_atomically(path: Path, content: bytes, *, mode: int) -> None:
    """Write `content` to `path` in the same way. It has the permissions `mode` from the first byte on."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    temporary.replace(path)
