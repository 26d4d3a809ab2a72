"""The record of a run over SSH: on each of its hosts, and as an index of these hosts on the machine that deployed it.

The index is `RUN/ssh.json`, or `RUN/ssh_docker.json`, in the user's state directory. What actually runs is determined by the hosts.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from swarmtrain.config.schema.runner import RunnerType
from swarmtrain.errors import RunNotFound
from swarmtrain.launchers.common.history_store import resolve_run_directory, resolve_state_directory
from swarmtrain.launchers.ssh.host_connections import ConnectionPool, HostGroup
from swarmtrain.remote.process_spec import write_atomically


@dataclass(frozen=True)
class SshRunRecord:
    """What a later launcher must know about the run; the same on every host."""

    interpreters: dict[str, str]
    """Interpreter of each host to call, by host name, the coordinator's host first."""
    nodes: dict[str, str]
    """Host of each node."""
    address: str
    """The coordinator's address for the other hosts."""
    store_port: int
    coordinator_port: int
    cwd: str
    stop_grace: float
    code: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    terminating: bool = False
    """It was taken down, except on hosts that could not be reached."""

    @property
    def coordinator_host(self) -> str:
        """The host of the coordinator."""
        return next(iter(self.interpreters))

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SshRunRecord:
        """Return the record that `to_json` has serialized. Raises TypeError."""
        return cls(**{**values, "code": tuple(values["code"]), "secrets": tuple(values["secrets"])})

    def restrict_to_hosts(self, hosts: list[str]) -> SshRunRecord:
        """Return the record of a run that still has to be removed from `hosts`."""
        return replace(self, interpreters={name: self.interpreters[name] for name in hosts}, terminating=True)


class RunIndex:
    """The runs of one runner type that were deployed from this machine."""

    def __init__(self, runner_type: RunnerType, connections: ConnectionPool) -> None:
        self._file_name, self._connections = f"{runner_type.value}.json", connections

    def list_runs(self, *, terminating: bool = False) -> list[str]:
        """Return the names of runs, sorted: those that are up, or those that are `terminating`. Raises OSError."""
        names = []
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(path.name for path in resolve_state_directory().iterdir()):
                with contextlib.suppress(RunNotFound):
                    names += [name] if self.read_record(name).terminating is terminating else []
        return names

    def read_record(self, run: str) -> SshRunRecord:
        """Return the run's record. Raises RunNotFound."""
        try:
            return SshRunRecord.from_dict(json.loads(self._build_record_path(run).read_text(encoding="utf-8")))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            known_runs = ", ".join(path.parent.name for path in resolve_state_directory().glob(f"*/{self._file_name}")) or "none"
            message = f"no run of this name was brought up over SSH from this machine; there is: {known_runs}"
            raise RunNotFound(message, place=f"run {run}", hint="deploying its config from here finds it, if it is up") from None

    def write_record(self, run: str, record: SshRunRecord) -> None:
        """Write the run's record. Raises OSError."""
        self._build_record_path(run).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._build_record_path(run), record.to_json(), mode=0o600)

    def remove_record(self, run: str) -> None:
        """Remove the run's record, and its folder if that is then empty."""
        self._build_record_path(run).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            resolve_run_directory(run).rmdir()

    def open_run(self, run: str) -> tuple[SshRunRecord, HostGroup]:
        """Return the record of `run`, and its hosts. Raises RunNotFound."""
        record = self.read_record(run)
        return record, self._connections.build_host_group(list(record.interpreters), record.interpreters)

    def _build_record_path(self, run: str) -> Path:
        return resolve_run_directory(run) / self._file_name
