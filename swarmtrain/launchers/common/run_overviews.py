"""Overviews of all runs of a launcher, from its queries for single runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from swarmtrain.errors import RunNotFound, SwarmtrainError
from swarmtrain.launchers.base import OVERVIEW_EVENTS, RunOverview, TaskState
from swarmtrain.protocol import Event
from swarmtrain.protocol.run_identity import RunIdentity

_THREADS = 8


class RunQueries(Protocol):
    """The queries of a launcher, swarmtrain.launchers.base.Launcher, from which an overview is made."""

    def list_runs(self) -> list[str]: ...

    def read_identity(self, run: str) -> RunIdentity: ...

    def list_tasks(self, run: str) -> list[TaskState]: ...

    def read_events(self, run: str, since: float | None = None, tail: int | None = None) -> list[Event]: ...


def read_overviews(launcher: RunQueries) -> list[RunOverview]:
    """Return an overview of each run of `launcher`. A run that is removed meanwhile is left out. Raises the errors of list_runs."""
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="runs") as pool:
        overviews = pool.map(lambda run: _read_overview(launcher, run), launcher.list_runs())
        return [overview for overview in overviews if overview]


def _read_overview(launcher: RunQueries, run: str) -> RunOverview | None:
    try:
        identity = launcher.read_identity(run)
        try:
            return RunOverview(run, identity, tuple(launcher.list_tasks(run)), tuple(launcher.read_events(run, tail=OVERVIEW_EVENTS)))
        except RunNotFound:
            raise
        except SwarmtrainError as error:
            return RunOverview(run, identity, (), (), error=error.message)
    except RunNotFound:
        return None
