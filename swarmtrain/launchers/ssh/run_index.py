"""Record of a run of processes, stored on each of its hosts, and an index of these hosts on the machine that deployed the run.

The index is `RUN/ssh.json`, or `RUN/ssh_docker.json`, in the user's state directory. The index of a local run is the record in its folder,
`RUN/local.json`. The states of the processes are read from the hosts.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from swarmtrain.atomic_file import SECRET_MODE, write_text_atomically
from swarmtrain.errors import RunNotFound, StackError
from swarmtrain.launchers.common.history_store import create_run_folder, resolve_run_folder, resolve_state_directory
from swarmtrain.launchers.common.local_run_folder import UNKNOWN_IDENTITY, select_dataclass_fields
from swarmtrain.launchers.ssh.host_connections import LOCALHOST, ConnectionPool, HostGroup
from swarmtrain.protocol import PROTOCOL_VERSION, RENDEZVOUS_SERVICE
from swarmtrain.protocol.run_identity import RunIdentity

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class RunRecord:
    """Record of a run of processes: the data that a later launcher process needs. Every host has the same record.

    The defaults are for records of other versions of swarmtrain, whose runs can be listed, stopped and removed.
    """

    protocol: int = 7
    """Version of the protocol of the run's processes. The default is the version of records that lack this field."""
    interpreters: dict[str, str] = field(default_factory=lambda: {LOCALHOST: sys.executable})
    """Path of the Python interpreter on each host, by host name, the coordinator's host first."""
    nodes: dict[str, str] = field(default_factory=dict)
    """Host of each node, by node name."""
    hosts: dict[str, str] = field(default_factory=dict)
    """Host of each node in the plan, if all nodes run on this machine instead (`local`)."""
    address: str = LOOPBACK
    """Address at which the other hosts reach the coordinator."""
    coordinator_port: int = 0
    cwd: str = ""
    stop_grace: float = 90.0
    code: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    identity: RunIdentity = UNKNOWN_IDENTITY
    terminating: bool = False
    """Whether the run was taken down on all hosts except those that could not be reached."""

    @property
    def coordinator_host(self) -> str:
        """Name of the host that runs the coordinator."""
        return next(iter(self.interpreters))

    @property
    def hosts_by_process(self) -> dict[str, str]:
        """Host of each process, by process name, nodes first."""
        return {**self.nodes, RENDEZVOUS_SERVICE: self.coordinator_host}

    def get_displayed_host(self, process_name: str) -> str:
        """Return the host of a process as the plan names it."""
        return self.hosts.get(process_name) or self.hosts_by_process.get(process_name, self.coordinator_host)

    def check_protocol(self, run: str) -> None:
        """Raise StackError if the processes of `run` use another version of the protocol."""
        if self.protocol != PROTOCOL_VERSION:
            hint = f"remove the run with swarmtrain down {run}, then deploy again"
            raise StackError("its record was written by another version of swarmtrain", place=f"run {run}", hint=hint)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunRecord:
        """Return the record that `to_json` serialized. Raises TypeError if `values` is not a record.

        The record of a local run of an earlier version has only `hosts`, and no `nodes`.
        """
        values = {"hosts": {}, **values}
        return cls(**select_dataclass_fields(cls, {"nodes": dict.fromkeys(values["hosts"], LOCALHOST), **values}))

    def restrict_to_hosts(self, hosts: list[str]) -> RunRecord:
        """Return a copy of the record with only `hosts`, from which the run is not removed yet."""
        return replace(self, interpreters={name: self.interpreters[name] for name in hosts}, terminating=True)


class RunIndex:
    """Read and write the index of the runs of one runner type that were deployed from this machine."""

    def __init__(self, runner_type: str, connections: ConnectionPool) -> None:
        self._file_name, self._connections = f"{runner_type}.json", connections

    def list_runs(self, *, terminating: bool = False) -> list[str]:
        """Return the sorted names of the deployed runs; with `terminating`, of the runs whose removal is incomplete. Raises OSError."""
        names = []
        with contextlib.suppress(FileNotFoundError):
            for name in sorted(path.name for path in resolve_state_directory().iterdir()):
                with contextlib.suppress(RunNotFound):
                    names += [name] if self.read_record(name).terminating is terminating else []
        return names

    def read_record(self, run: str) -> RunRecord:
        """Return the record of `run`. Raises RunNotFound if the index does not contain the run."""
        try:
            return RunRecord.from_dict(json.loads(self._build_record_path(run).read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            known_runs = ", ".join(path.parent.name for path in resolve_state_directory().glob(f"*/{self._file_name}")) or "none"
            message = f"no run of this name was deployed from this machine; existing runs: {known_runs}"
            raise RunNotFound(
                message, place=f"run {run}", hint="if the run is up, add it to the index of this machine with: swarmtrain deploy CONFIG"
            ) from None

    def write_record(self, run: str, record: RunRecord) -> None:
        """Write the record of `run` to the index. Raises OSError if it cannot be written."""
        create_run_folder(run)
        write_text_atomically(self._build_record_path(run), record.to_json(), mode=SECRET_MODE)

    def remove_record(self, run: str) -> None:
        """Remove the record of `run` from the index, and the run's folder if it is then empty."""
        self._build_record_path(run).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            resolve_run_folder(run).rmdir()

    def read_record_and_hosts(self, run: str) -> tuple[RunRecord, HostGroup]:
        """Return the record of `run`, and the group of its hosts. Raises RunNotFound if the run does not exist."""
        record = self.read_record(run)
        return record, self._connections.build_host_group(list(record.interpreters), record.interpreters)

    def _build_record_path(self, run: str) -> Path:
        return resolve_run_folder(run) / self._file_name
