"""The page of a cluster as a value: all runs, the queue, and the machines with their GPUs and who has them. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain.launchers.base import RunOverview
from swarmtrain.queueing.queue_service import SchedulerStatus
from swarmtrain.view.dashboard.cluster_machines import ClusterMachine, SwarmState, build_cluster_machines
from swarmtrain.view.dashboard.page_data import PageData, replace_non_finite_numbers
from swarmtrain.view.queue_table import NO_SCHEDULER_TEXT, QueueTable, build_queue_table
from swarmtrain.view.run_table import RunRow, build_run_table


@dataclass(frozen=True)
class ClusterPage:
    """What the page of a cluster shows at `time`, in seconds since the epoch."""

    runs: tuple[RunRow, ...]
    queue: QueueTable | None
    """None if there is no scheduler, and no run in the queue."""
    queue_note: str
    """Why there is no queue; empty if there is one."""
    machines: tuple[ClusterMachine, ...]
    problems: tuple[str, ...]
    """Why the runs of a launcher, or the machines, are missing."""
    time: float

    def list_keys(self) -> dict[str, RunRow]:
        """Return the runs by the key that names them on the page: the name, or the id if several runs have the name."""
        counts = Counter(row.run for row in self.runs)
        return {row.run if counts[row.run] == 1 else row.id: row for row in self.runs}

    def to_page_data(self) -> PageData:
        """Return the page as a JSON-compatible value. It stays equal while nothing changes and no start is estimated.

        Estimates of starts are in seconds from `time` on; all other times are in seconds since the epoch.
        """
        page_data: dict[str, Any] = {
            "runs": [{**asdict(row), "key": key} for key, row in self.list_keys().items()],
            "queue": [asdict(row) for row in self.queue.runs] if self.queue else None,
            "scheduler": str(self.queue.scheduler or NO_SCHEDULER_TEXT) if self.queue else "",
            "queue_note": self.queue_note,
            "machines": [asdict(machine) for machine in self.machines],
            "problems": list(self.problems),
        }
        clean: PageData = replace_non_finite_numbers(page_data)
        return clean


def build_cluster_page(
    located_overviews: Iterable[tuple[str, RunOverview]],
    swarm: SwarmState | None,
    scheduler: SchedulerStatus | str | None,
    problems: Sequence[str],
    now: float,
) -> ClusterPage:
    """Return the page at `now` of the runs with these overviews, each with the location of its launcher.

    `swarm`: None if this machine reaches none. `scheduler`: its status; the reason why there is no queue; None if there are runs
    in the queue without a scheduler.
    """
    located_overviews = list(located_overviews)
    runs = build_run_table(located_overviews, now).runs
    queue, note = None, ""
    if isinstance(scheduler, str) or swarm is None:
        note = str(scheduler)
    else:
        queue = build_queue_table(swarm.queue, scheduler, swarm.starts, now)
    return ClusterPage(runs, queue, note, build_cluster_machines(swarm, located_overviews, now), tuple(problems), now)
