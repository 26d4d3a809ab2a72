"""The interface that every launcher implements, and the values that cross it.

A launcher reads an inventory, carries out a plan, and reports what happens as a stream of updates. It prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmtrain.config import Config
from swarmtrain.plan import Cargo, Inventory, Plan
from swarmtrain.protocol import Event

ProgressReporter = Callable[[str], None]
"""Takes one line of progress for the user."""


@dataclass(frozen=True)
class Finding:
    """A problem that a check found: where, what, and the command or change that fixes it. A `fatal` one keeps a run from working."""

    place: str
    message: str
    hint: str | None = None
    fatal: bool = True
    why: str = ""
    """Why it matters, if the message does not say so."""


@dataclass(frozen=True)
class LogLine:
    """One line of output. `rank` is None for lines that no rank wrote; `time` is seconds since the epoch."""

    node: str
    text: str
    rank: int | None = None
    time: float = 0.0


@dataclass(frozen=True)
class TaskState:
    """State of one service (a node or the rendezvous).

    `state` is in Swarm's words, `reason` in the words of the component that reported it.
    """

    node: str
    host: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    gpus: tuple[str, ...] = ()
    """The GPUs that it has reserved: their ids, or the count of each kind."""


RunUpdate = Event | LogLine | TaskState


class Change(Protocol):
    """One change that `deploy` would make; str() gives it with its cause."""

    @property
    def interrupts(self) -> bool:
        """Whether something that is running gets restarted."""
        ...


@dataclass(frozen=True)
class Action:
    """A change to one object, and why: the change type of launchers that need no more detail."""

    verb: str
    name: str
    cause: str
    interrupts: bool = False
    """Whether something that is running gets restarted."""

    def __str__(self) -> str:
        return f"{self.verb} {self.name}: {self.cause}"


class Launcher(Protocol):
    """Deploys and removes runs in one kind of place. Methods deliberately raise only SwarmtrainError."""

    @property
    def location(self) -> str:
        """The place that the launcher changes, shown to the user beforehand."""
        ...

    def read_inventory(self) -> Inventory:
        """Return the available machines, in the order in which they are to be used."""
        ...

    def check_plan(self, plan: Plan) -> list[Finding]:
        """Return what would keep `plan` from working. Cheap checks only."""
        ...

    def plan_changes(self, plan: Plan) -> Sequence[Change]:
        """Return the changes that `deploy` would make, in order; empty if the run matches the plan."""
        ...

    def deploy(self, plan: Plan, report_progress: ProgressReporter) -> None:
        """Make the run match `plan`: create, change, add, remove. What already matches is left alone.

        A first deploy that fails or is interrupted removes what it created, except what somebody else has changed since. `deploy`,
        `stop` and `tear_down` of one run are serialized, whichever machines they come from: a second one reports the holder that it
        waits for. The lock covers only the changes, not the wait for containers to start: a deploy that waits for containers ends with
        an error if another command changes the run.
        """
        ...

    def load_deployment(self, run: str) -> tuple[Config, Cargo]:
        """Return the config (with its hosts) and the cargo that `run` was deployed with, from which a new plan can be made.

        A secret's content cannot be read back. Its digest can, which is enough for an unchanged secret. Raises RunNotFound.
        """
        ...

    def list_runs(self) -> list[str]:
        """Return the names of all existing runs, sorted."""
        ...

    def list_terminating_runs(self) -> list[str]:
        """Return the names of runs that are not completely removed: something still stops, or a removal was interrupted.

        `tear_down` finishes the removal.
        """
        ...

    def list_tasks(self, run: str) -> list[TaskState]:
        """Return the state of each service of `run`, nodes first. Raises RunNotFound."""
        ...

    def read_events(self, run: str, since: float | None = None) -> list[Event]:
        """Return the coordinator's events so far, oldest first. Raises RunNotFound.

        `since`, in seconds since the epoch, leaves out older events, as far as that saves work.
        """
        ...

    def watch(self, run: str) -> Iterator[RunUpdate]:
        """Yield what happens from now on, and the coordinator's events from the start, until the run's outcome or its removal.

        Raises RunNotFound.
        """
        ...

    def stream_logs(
        self,
        run: str,
        *,
        follow: bool,
        tail: int | None = None,
        since: float | None = None,
        node: str | None = None,
        report_progress: ProgressReporter | None = None,
    ) -> Iterator[LogLine]:
        """Yield the output of all nodes, or of `node`, as one stream ordered by time. Raises RunNotFound.

        `tail`: only the last lines of each node. `since`: only lines from this time on, in seconds since the epoch. `report_progress`
        is called when nothing can be read for a while, and when reading works again.
        """
        ...

    def stop(self, run: str, report_progress: ProgressReporter) -> None:
        """Ask the ranks to save and exit; the run and its coordinator stay, and a deploy resumes it. Raises RunNotFound."""
        ...

    def tear_down(self, run: str, report_progress: ProgressReporter) -> None:
        """Remove the run and return when nothing of it is left. Raises RunNotFound."""
        ...
