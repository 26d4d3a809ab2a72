"""Table of all runs that exist, of all users and launchers: owner, nodes, reserved GPUs, state, step and age."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.launchers.base import RunOverview, TaskState
from swarmtrain.launchers.run_discovery import discover_overviews
from swarmtrain.protocol import RENDEZVOUS_SERVICE
from swarmtrain.view.formatting import format_duration, format_table
from swarmtrain.view.status import build_status


@dataclass(frozen=True)
class RunRow:
    """One run in a table. Times are in seconds since the epoch. Values that the table's source does not contain keep their default."""

    run: str
    id: str
    owner: str
    """Name of the person who brought the run up; empty if it is unknown."""
    state: str
    """A state of RunStatus, `unreachable`, or `down` for a past run."""
    reason: str = ""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    """Training loss of the newest step."""
    location: str = ""
    """Where the run's launcher makes changes, such as the address of an engine."""
    running_nodes: int = 0
    nodes: int = 0
    gpus: int = 0
    """Number of reserved GPUs, which only a swarm knows."""
    created: float = 0.0
    """Time at which the run was brought up; 0 if it is unknown."""
    original_id: str = ""
    """Id of the run whose checkpoints this run resumed; its own id if it has resumed none."""
    started: float | None = None
    """Time at which the run's coordinator first started."""
    seconds: float | None = None
    """Duration of the run."""
    last: float | None = None
    """Time of the last event."""


@dataclass(frozen=True)
class RunTable:
    """All runs, newest last, at `time` in seconds since the epoch."""

    runs: tuple[RunRow, ...]
    time: float

    def to_dict(self) -> dict[str, Any]:
        """Return the table as a JSON-compatible dict, for `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        repeated_names = {name for name, count in Counter(row.run for row in self.runs).items() if count > 1}
        header = ["RUN", "ID", "OWNER", "NODES", "GPUS", "STATE", "STEP", "AGE", ""]
        rows = [header, *(self._format_row(row, shows_location=row.run in repeated_names) for row in self.runs)]
        if not any(row.gpus for row in self.runs):
            rows = [[cell for cell, title in zip(row, header, strict=True) if title != "GPUS"] for row in rows]
        return format_table(rows)

    def _format_row(self, row: RunRow, *, shows_location: bool) -> list[str]:
        nodes = f"{row.running_nodes}/{row.nodes}" if row.nodes else ""
        step = "" if row.step is None else f"{row.step}/{row.steps}" if row.steps else f"{row.step}"
        age = format_duration(self.time - row.created) if row.created else ""
        remark = "; ".join(filter(None, (f"on {row.location}" if shows_location else "", row.reason)))
        return [row.run, row.id, row.owner, nodes, str(row.gpus or ""), row.state, step, age, remark]


def load_run_table() -> RunTable:
    """Return the table of the runs of all reachable launchers. Raises the error of a launcher that should be, if there are no runs."""
    overviews, errors = discover_overviews({})
    if errors and not overviews:
        raise errors[0]
    return build_run_table([(launcher.location, overview) for launcher, overview in overviews], time.time())


def build_run_table(located_overviews: Iterable[tuple[str, RunOverview]], now: float) -> RunTable:
    """Return the table at `now` of the runs with these overviews, each with the location of its launcher."""
    rows = [_build_row(overview, location, now) for location, overview in located_overviews]
    return RunTable(tuple(sorted(rows, key=lambda row: (row.created, row.run))), now)


def _build_row(overview: RunOverview, location: str, now: float) -> RunRow:
    nodes = [task for task in overview.tasks if task.node != RENDEZVOUS_SERVICE]
    status = build_status(overview.run, overview.last_events, nodes, now)
    return RunRow(
        overview.run,
        overview.identity.id,
        overview.identity.owner,
        state="unreachable" if overview.error else status.state,
        reason="; ".join(filter(None, (overview.error or status.reason, overview.note))),
        location=location,
        running_nodes=sum(task.state == "running" for task in nodes),
        nodes=len(nodes),
        gpus=_count_gpus(nodes),
        step=status.progress.get("step"),
        steps=status.progress.get("steps"),
        loss=status.progress.get("loss"),
        created=overview.identity.created,
    )


def _count_gpus(tasks: Iterable[TaskState]) -> int:
    """Return the number of GPUs that are assigned to `tasks`."""
    amounts = [gpu.partition(" ") for task in tasks for gpu in task.gpus]  # the id of one GPU, or "2 NVIDIA-GPU"
    return sum(int(amount) if kind and amount.isdigit() else 1 for amount, _, kind in amounts)
