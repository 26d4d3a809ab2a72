"""What is known of a run over SSH: on each of its hosts, and on the machine that brought it up, as an index of where to ask.

The index is `RUN/pdsh.json`, or `RUN/pdsh_docker.json`, in the user's state directory. What runs is decided by what the hosts say.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swarmtrain.config.runner import RunnerType
from swarmtrain.errors import RunNotFound
from swarmtrain.host.spec import replace as write
from swarmtrain.launchers.kept import directory, state_directory
from swarmtrain.launchers.ssh.host import Connections, Team


@dataclass(frozen=True)
class Record:
    """What a later launcher must know of the run, the same on every host."""

    pythons: dict[str, str]
    """Interpreter of each host that is to be asked, by its name, the board's first."""
    nodes: dict[str, str]
    """Node to host."""
    address: str
    """Where the other hosts find the board."""
    store_port: int
    board_port: int
    cwd: str
    stop_grace: float
    code: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    leaving: bool = False
    """It was taken down, but for hosts that could not be reached."""

    @property
    def board(self) -> str:
        """The host that has the notice board."""
        return next(iter(self.pythons))

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        """Read it back. Raises TypeError."""
        return cls(**{**values, "code": tuple(values["code"]), "secrets": tuple(values["secrets"])})

    def on(self, hosts: list[str]) -> Record:
        """Return the record of what is left to be removed from `hosts`."""
        return replace(self, pythons={name: self.pythons[name] for name in hosts}, leaving=True)


class Index:
    """The runs of one kind that were brought up from here."""

    def __init__(self, kind: RunnerType, connections: Connections) -> None:
        self._file, self._connections = f"{kind.value}.json", connections

    def runs(self, *, leaving: bool = False) -> list[str]:
        """Return the names of runs, sorted: those that are up, or those that are `leaving`. Raises OSError."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(path.name for path in state_directory().iterdir()):
                with contextlib.suppress(RunNotFound):
                    found += [name] if self.read(name).leaving is leaving else []
        return found

    def read(self, run: str) -> Record:
        """Raises RunNotFound."""
        try:
            return Record.of(json.loads(self._path(run).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            known = ", ".join(path.parent.name for path in state_directory().glob(f"*/{self._file}")) or "none"
            message = f"no run of this name was brought up over SSH from this machine; there is: {known}"
            raise RunNotFound(message, place=f"run {run}", hint="deploying its config from here finds it, if it is up") from None

    def write(self, run: str, record: Record) -> None:
        """Note it. Raises OSError."""
        self._path(run).parent.mkdir(parents=True, exist_ok=True)
        write(self._path(run), record.to_json(), mode=0o600)

    def forget(self, run: str) -> None:
        """It is gone."""
        self._path(run).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            directory(run).rmdir()

    def team(self, run: str) -> tuple[Record, Team]:
        """Return what is known of `run`, and its hosts. Raises RunNotFound."""
        record = self.read(run)
        return record, self._connections.to(list(record.pythons), record.pythons)

    def _path(self, run: str) -> Path:
        return directory(run) / self._file
