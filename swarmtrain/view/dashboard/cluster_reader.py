"""Reads the page of a cluster from all launchers and from the swarm's managers, and opens the data sources of its runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from swarmtrain.errors import EngineError, RunNotFound, StackError, SwarmAbsentError, SwarmtrainError
from swarmtrain.launchers.base import Launcher, RunOverview
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.common.history_store import RecordedRun, find_recorded_run
from swarmtrain.launchers.run_discovery import discover_overviews
from swarmtrain.launchers.swarm.machines.machine_records import read_gpu_ids
from swarmtrain.queueing.queue_service import SchedulerStatus, read_scheduler_status
from swarmtrain.queueing.queue_state import QueueReader, QueueState
from swarmtrain.view.dashboard.cluster_machines import SwarmState
from swarmtrain.view.dashboard.cluster_page import ClusterPage, build_cluster_page
from swarmtrain.view.dashboard.data_source import RunDataSource
from swarmtrain.view.queue_table import estimate_queue_starts

_ESTIMATE_FACTOR = 20.0
"""How many times as long as the estimate of starts has taken, it is used."""


class ClusterReader:
    """Reads the page of the cluster, and opens its runs. Keeps connections, and what the reader of the queue remembers."""

    def __init__(self) -> None:
        self._launchers: dict[str, Launcher] = {}
        self._overviews: dict[str, tuple[Launcher, RunOverview]] = {}
        """The runs of the newest page, by id."""
        self._queue_reader: QueueReader | None = None
        self._start_estimator = StartEstimator()

    def read_page(self) -> ClusterPage:
        """Return the current page. Raises the error of a launcher if none answers."""
        overviews, errors = discover_overviews(self._launchers)
        swarm: SwarmState | None = None
        scheduler: SchedulerStatus | str | None = "this machine does not reach a swarm"
        if swarm_launcher := self._launchers.get("swarm"):
            try:
                own = [overview for launcher, overview in overviews if launcher is swarm_launcher]
                swarm, scheduler = self._read_swarm(swarm_launcher.location, own)
            except SwarmtrainError as error:
                scheduler, errors = str(error), [*errors, error]
                if isinstance(error, EngineError) and error.status is None:  # no answer: its SSH tunnel may be closed
                    self._queue_reader = None
        failures = [error for error in errors if not isinstance(error, SwarmAbsentError)]
        if failures and not overviews and swarm is None:
            raise failures[0]
        problems = list(dict.fromkeys(str(error) for error in failures))
        self._overviews = {overview.identity.id: (launcher, overview) for launcher, overview in overviews}
        located = [(launcher.location, overview) for launcher, overview in overviews]
        return build_cluster_page(located, swarm, scheduler, problems, time.time())

    def open_run(self, name_or_id: str) -> RunDataSource:
        """Return the data source of a run of the newest page, by its id, or of a run that is recorded on this machine.

        Raises RunNotFound.
        """
        if name_or_id in self._overviews:
            launcher, overview = self._overviews[name_or_id]
            return RunDataSource(RecordedRun(overview.run, overview.identity), launcher)
        if recorded_run := find_recorded_run(name_or_id):
            return RunDataSource(recorded_run, None)
        known = ", ".join(sorted(overview.run for _, overview in self._overviews.values())) or "none"
        raise RunNotFound(f"unknown run; existing runs: {known}", place=f"run {name_or_id}", hint="swarmtrain history lists all known runs")

    def find_launcher(self, run_id: str) -> Launcher | None:
        """Return the launcher of a run of the newest page; None if the run is not on it."""
        launcher, _ = self._overviews.get(run_id, (None, None))
        return launcher

    def _read_swarm(self, location: str, overviews: Sequence[RunOverview]) -> tuple[SwarmState, SchedulerStatus | str | None]:
        """Return the swarm, and the status of its scheduler: the reason if it has none, but None if runs are in the queue nevertheless."""
        if self._queue_reader is None:
            self._queue_reader = QueueReader(DockerEngine())
        engine = self._queue_reader.engine
        queue = self._queue_reader.read_state(time.time())
        state = SwarmState(location, queue, read_gpu_ids(engine))
        try:
            scheduler = read_scheduler_status(engine)
        except StackError as error:  # there is none
            is_used = any(not run.is_finished for run in queue.snapshot.runs)
            return state, None if is_used else f"{error}; start one with: {error.hint}"
        return replace(state, starts=self._start_estimator.estimate(queue, overviews)), scheduler


class StartEstimator:
    """Estimates when waiting runs start, again only after a multiple of the time that it took: a long queue takes seconds."""

    def __init__(self, get_seconds: Callable[[], float] = time.monotonic) -> None:
        """`get_seconds`: a monotonic clock."""
        self._get_seconds = get_seconds
        self._starts: dict[str, float] = {}
        """Time of the start by run, in seconds since the epoch."""
        self._next_time = 0.0

    def estimate(self, queue: QueueState, overviews: Sequence[RunOverview]) -> dict[str, float]:
        """Return in how many seconds waiting runs start, by run, as far as that is known."""
        began = self._get_seconds()
        if began >= self._next_time:
            now = time.time()
            self._starts = {run: now + seconds for run, seconds in estimate_queue_starts(queue, overviews, now).items()}
            ended = self._get_seconds()
            self._next_time = ended + _ESTIMATE_FACTOR * (ended - began)
        return {run: max(0.0, start - time.time()) for run, start in self._starts.items()}
