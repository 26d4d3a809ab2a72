"""Spec and state of a process under a process keeper: two small JSON files, NODE.spec and NODE.state."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from swarmtrain.atomic_file import SECRET_MODE, write_text_atomically


@dataclass(frozen=True)
class ProcessSpec:
    """Spec of a process that a process keeper runs.

    `content_digest`: hash of the files that the process reads. If their content changes, the process must be replaced.
    """

    name: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    stdout: str
    stderr: str
    content_digest: str
    cleanup_command: list[str] = field(default_factory=list)
    """Command that removes leftovers: run if `prepare_command` fails, and after the final exit of the process."""
    prepare_command: list[str] = field(default_factory=list)
    """Command that is run before each start. It is never interrupted: the engine would still create the container."""
    stop_command: list[str] = field(default_factory=list)
    """Command that stops the process gracefully; needed if SIGTERM to the process of `argv` would not reach it, as in a container."""

    def save(self, path: Path) -> None:
        """Write the spec to `path`, readable by its owner only: it contains the user's environment."""
        write_text_atomically(path, json.dumps(asdict(self), indent=1), mode=SECRET_MODE)

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
