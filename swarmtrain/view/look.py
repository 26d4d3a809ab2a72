"""What there is to see of a run: what its place says now, and what was kept on this machine of what it has said before."""

from __future__ import annotations

import time

from swarmtrain.errors import EngineError, RunNotFound, StateError
from swarmtrain.launchers import everywhere, find_run, kept
from swarmtrain.launchers.base import Launcher, TaskState
from swarmtrain.view import history
from swarmtrain.view.console import say
from swarmtrain.view.data import show, show_json
from swarmtrain.view.status import Status, status
from swarmtrain.view.watch import watch
from swarmtrain.view.why import BEFORE, Why, first_failure, why
from swarmtrain.wire import JOINED, PROBE, Event

_TAIL = 2000
"""Lines of each node that are looked through."""


def look(place: Launcher, run: str) -> Status:
    """Return how a run stands. Raises RunNotFound."""
    return status(run, live_events(place, run), place.tasks(run), time.time())


def live_events(place: Launcher, run: str) -> list[Event]:
    """Return the events of a run that is there; what its board has forgotten comes from what was kept. Raises RunNotFound."""
    said = place.events(run)
    return kept.merged(kept.since_down(kept.events(run)), said)


def show_watched(place: Launcher, run: str) -> None:
    """Show how a run stands, again and again, until it has ended or is taken down."""
    say(f"watching {run}; Ctrl-C ends that, the job goes on")
    if watch(Watched(place, run).look) is None:
        say(f"{run} was taken down\nhint: swarmtrain history {run}")


class Watched:
    """A run that is looked at again and again: of its board's log, only what is new is read."""

    _OVERLAP = 60.0

    def __init__(self, place: Launcher, run: str) -> None:
        self._place, self._run = place, run
        self._events: list[Event] = []

    def look(self) -> Status:
        """Return how the run stands. Raises RunNotFound."""
        since = self._events[-1].time - self._OVERLAP if self._events else None
        new = live_events(self._place, self._run) if since is None else self._place.events(self._run, since)
        self._events = kept.merged(self._events, new)
        return status(self._run, self._events, self._place.tasks(self._run), time.time())


def show_history(run: str | None, *, as_json: bool) -> None:
    """Show what befell a run, or without one, which runs are known here. Raises RunNotFound."""
    if run is None:
        show(history.runs(known_runs()), as_json=as_json)
        return
    events = kept.merged(kept.events(run), ())
    try:
        place, found = find_run(run)
        events = kept.merged(events, place.events(found))
    except (RunNotFound, EngineError, StateError):
        if not events:
            raise
    show(history.history(run, events), as_json=as_json)


def show_why(run: str | None, *, as_json: bool) -> None:
    """Show why a run died, on one screen; also of one that is down. Raises RunNotFound."""
    name, found = _why(run)
    if found is None:
        say(f"nothing of {name} has failed\nhint: swarmtrain status {name}")
        if as_json:
            show_json({"run": name, "error": None})
    else:
        show(found, as_json=as_json)


def _why(run: str | None) -> tuple[str, Why | None]:
    try:
        place, name = find_run(run)
        return name, why_of(place, name)
    except (RunNotFound, EngineError, StateError):
        if run is None or not kept.events(run):
            raise
    events = kept.merged(kept.last_life(kept.events(run)), ())
    nodes = sorted({str(event.data.get("node")) for event in events if event.kind == JOINED})
    return run, why(run, events, [TaskState(node, "", "down") for node in nodes], kept.lines(run, newest=True))


def why_of(place: Launcher, run: str) -> Why | None:
    """Return why a run that is there died, or had to start its ranks anew; None if nothing has failed. Raises RunNotFound."""
    events = live_events(place, run)
    first = first_failure(events)
    since = first.time - BEFORE if first else None
    lines = place.logs(run, follow=False, tail=_TAIL, since=since)
    return why(run, events, place.tasks(run), lines)


def known_runs() -> list[history.Known]:
    """Return the runs that are there, in any place that can be reached, and those of which something was kept here."""
    now = time.time()
    there = {run: place for place, run in everywhere()[1]}
    gone = {run: kept.last_life(kept.events(run)) for run in kept.runs() if run not in there}
    found = [history.known(run, events, None, now) for run, events in gone.items() if not any(event.kind == PROBE for event in events)]
    for run, place in there.items():
        events = live_events(place, run)
        state = status(run, events, place.tasks(run), now).state
        found.append(history.known(run, events, state, now))
    return found
