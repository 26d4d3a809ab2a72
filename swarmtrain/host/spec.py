"""What a keeper is told, and what it tells: two small files of JSON beside each other, NODE.spec and NODE.state."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Spec:
    """What is to be kept going. `content` stands for the files that it reads: with another content it is another process."""

    name: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    content: str
    clean: list[str] = field(default_factory=list)
    """Run where `prepare` fails, since an earlier process may have left what is in its way, and when it has ended for good."""
    prepare: list[str] = field(default_factory=list)
    """Run before each start, and never interrupted: what it asks for is made even if nobody waits for it any more."""
    end: list[str] = field(default_factory=list)
    """Run to ask the process to end, where SIGTERM to `argv` would not reach it."""

    def save(self, path: Path) -> None:
        """Write it to `path`, readable by its owner alone: the environment is the user's own."""
        replace(path, json.dumps(asdict(self), indent=1), mode=0o600)

    @classmethod
    def load(cls, path: Path) -> Spec:
        """Read it back. Raises OSError, ValueError, TypeError."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class State:
    """How it stands, in Swarm's words: running, complete, failed (and about to be started again), shutdown."""

    keeper: int
    state: str
    exit_code: int | None = None
    restarts: int = 0


def replace(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Write `text` to `path` by rename, so that a reader finds the old or the new, whole."""
    replace_bytes(path, text.encode(), mode=mode)


def replace_bytes(path: Path, content: bytes, *, mode: int) -> None:
    """Write `content` to `path` in the same way; it is readable as `mode` says from its first byte on."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    new.replace(path)
