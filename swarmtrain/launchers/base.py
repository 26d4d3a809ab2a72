"""The port that every launcher implements, and the values that cross it.

A launcher reads an inventory, takes a plan, and says what happens as a stream of updates. It prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmtrain.config import Config
from swarmtrain.plan import Cargo, Inventory, Plan
from swarmtrain.wire import Event

Say = Callable[[str], None]
"""Takes one line of progress for a person."""


@dataclass(frozen=True)
class Finding:
    """Something that a check noticed: where, what, the command or change that mends it. `fatal` ones keep a run from working."""

    place: str
    message: str
    hint: str | None = None
    fatal: bool = True
    why: str = ""
    """Why it matters, where that is not plain from the message."""


@dataclass(frozen=True)
class LogLine:
    """One line of output. `rank` is None for lines that no rank wrote, `time` is seconds since the epoch."""

    node: str
    text: str
    rank: int | None = None
    time: float = 0.0


@dataclass(frozen=True)
class TaskState:
    """How one service (a node or the rendezvous) stands: `state` in Swarm's words, `reason` in whoever's words explain it."""

    node: str
    host: str
    state: str
    reason: str = ""
    exit_code: int | None = None
    gpus: tuple[str, ...] = ()
    """The GPUs that it has reserved, by id, or how many of which kind."""


Update = Event | LogLine | TaskState


class Change(Protocol):
    """One thing that an `up` would do; it prints itself with its cause."""

    @property
    def interrupts(self) -> bool:
        """Whether something that runs is ended and started again."""
        ...


@dataclass(frozen=True)
class Act:
    """What is done with one thing, and why: the change of launchers to which nothing more is to be said."""

    verb: str
    name: str
    cause: str
    interrupts: bool = False
    """Whether something that runs is ended and started again."""

    def __str__(self) -> str:
        return f"{self.verb} {self.name}: {self.cause}"


class Launcher(Protocol):
    """Brings runs up and down in one kind of place. Methods raise SwarmtrainError and nothing else on purpose."""

    @property
    def where(self) -> str:
        """The place that it changes, to be told before it does."""
        ...

    def inventory(self) -> Inventory:
        """Return the machines there are, in the order in which they are to be used."""
        ...

    def check(self, plan: Plan) -> list[Finding]:
        """Return what stands in the way of `plan`, cheap checks only."""
        ...

    def changes(self, plan: Plan) -> Sequence[Change]:
        """Return what `up` would do, in order. Nothing if all is as the plan says."""
        ...

    def up(self, plan: Plan, say: Say) -> None:
        """Make what runs equal to `plan`: create, change, add, remove. What is equal already is left alone.

        A first `up` that fails or is interrupted removes what it made, and nothing that somebody else has changed since.
        `up`, `stop` and `down` of one run change it one at a time, from whichever machines they come: a second one says
        whom it waits for. Only changes are waited for, not containers that start: an `up` that waits for those ends with
        an error when another command changes the run.
        """
        ...

    def deployed(self, run: str) -> tuple[Config, Cargo]:
        """Return the config (with its hosts) and the cargo that `run` was brought up with, so that a plan can be made anew.

        A secret's content cannot be read back; its digest can, which is all that an unchanged secret needs.
        Raises RunNotFound.
        """
        ...

    def runs(self) -> list[str]:
        """Return the names of all runs there are, sorted."""
        ...

    def leaving(self) -> list[str]:
        """Return the names of runs that are gone but for what still stops, or was left half removed; `down` ends that."""
        ...

    def tasks(self, run: str) -> list[TaskState]:
        """Return how each service of `run` stands, nodes first. Raises RunNotFound."""
        ...

    def events(self, run: str, since: float | None = None) -> list[Event]:
        """Return what stands on the run's notice board so far, oldest first. Raises RunNotFound.

        `since`, in seconds since the epoch, leaves out what is older, as far as that is less work.
        """
        ...

    def watch(self, run: str) -> Iterator[Update]:
        """Yield what happens from now on, and the board's events from the start, until the run's verdict or its removal.

        Raises RunNotFound.
        """
        ...

    def logs(
        self,
        run: str,
        *,
        follow: bool,
        tail: int | None = None,
        since: float | None = None,
        node: str | None = None,
        say: Say | None = None,
    ) -> Iterator[LogLine]:
        """Yield the output of all nodes, or of `node`, as one stream in the order of time. Raises RunNotFound.

        `tail`: the last lines of each node only. `since`: those from this time on, in seconds since the epoch.
        `say` is told when nothing can be read for a while, and when it can again.
        """
        ...

    def stop(self, run: str, say: Say) -> None:
        """Ask the ranks to save and leave; the run and its notice board stay, and an `up` resumes it. Raises RunNotFound."""
        ...

    def down(self, run: str, say: Say) -> None:
        """Remove the run and return when nothing of it is left. Raises RunNotFound."""
        ...
