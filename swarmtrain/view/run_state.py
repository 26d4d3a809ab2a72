"""State of a run: its launcher's current report, combined with earlier events that were stored on this machine."""

from __future__ import annotations

import time
from dataclasses import asdict

from swarmtrain.launchers.base import Launcher, TaskState
from swarmtrain.launchers.common.history_store import RecordedRun, list_continued_runs, list_recorded_runs, merge_events
from swarmtrain.launchers.run_discovery import discover_runs, find_recorded_run_of, find_run_or_record
from swarmtrain.protocol import EVENT_NODE_JOINED, EVENT_NODE_PROBE, Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.view import history
from swarmtrain.view.console import print_message
from swarmtrain.view.live_status import watch_status
from swarmtrain.view.output import print_json, print_result
from swarmtrain.view.run_table import RunRow
from swarmtrain.view.status import RunStatus, build_status
from swarmtrain.view.why import LINES_BEFORE_SECONDS, FailureDiagnosis, diagnose_failure, find_root_cause

_TAIL_LINES = 2000
"""Number of last output lines of each node that are searched for the cause of a failure."""


def load_status(launcher: Launcher, run: str) -> RunStatus:
    """Return the current status of `run`. Raises RunNotFound if there is no such run."""
    identity = launcher.read_identity(run)
    return build_status(run, load_live_run_events(launcher, run), launcher.list_tasks(run), time.time(), identity)


def load_live_run_events(launcher: Launcher, run: str) -> list[Event]:
    """Return all events of an existing run; events that its coordinator no longer stores are read from this machine's store.

    Raises RunNotFound if there is no such run.
    """
    reported = launcher.read_events(run)
    return merge_events(find_recorded_run_of(launcher, run).load_events(), reported)


def show_live_status(launcher: Launcher, run: str) -> None:
    """Show the status of a run, refreshed until the run has its outcome or is taken down."""
    print_message(f"watching {run}; Ctrl-C stops watching, the job continues")
    if watch_status(RunStatusPoller(launcher, run).poll_status) is None:
        print_message(f"{run} was taken down\nhint: swarmtrain history {run}")


class RunStatusPoller:
    """Polls the status of a run. After the first poll, only new events are read from the coordinator's log."""

    _OVERLAP_SECONDS = 60.0

    def __init__(self, launcher: Launcher, run: str) -> None:
        self._launcher, self._run = launcher, run
        self._events: list[Event] = []
        self._identity: RunIdentity | None = None

    def poll_status(self) -> RunStatus:
        """Return the current status of the run. Raises RunNotFound if there is no such run."""
        since = self._events[-1].time - self._OVERLAP_SECONDS if self._events else None
        new_events = load_live_run_events(self._launcher, self._run) if since is None else self._launcher.read_events(self._run, since)
        self._events = merge_events(self._events, new_events)
        self._identity = self._identity or self._launcher.read_identity(self._run)
        return build_status(self._run, self._events, self._launcher.list_tasks(self._run), time.time(), self._identity)


def show_history(run: str | None, *, as_json: bool) -> None:
    """Print the history of `run`, a name or an id, with those that it continues; if it is None, the list of known runs.

    Raises RunNotFound if there is no such run.
    """
    if run is None:
        print_result(history.build_run_list(list_known_runs()), as_json=as_json)
        return
    found = find_run_or_record(run)
    recorded_events = [event for recorded_run in list_continued_runs(found.recorded_run) for event in recorded_run.load_main_events()]
    events = merge_events(recorded_events, found.launcher.read_events(found.name) if found.launcher else ())
    print_result(history.build_history(found.name, found.recorded_run.identity, events), as_json=as_json)


def show_diagnosis(run: str | None, *, as_json: bool) -> None:
    """Print why a run failed, on one screen, even if the run is down. Raises RunNotFound if the run is unknown."""
    name, diagnosis = _diagnose_run(run)
    if diagnosis is None:
        print_message(f"run {name} has no failures\nhint: swarmtrain status {name}")
        if as_json:
            print_json({"run": name, "error": None})
    else:
        print_result(diagnosis, as_json=as_json)


def _diagnose_run(run: str | None) -> tuple[str, FailureDiagnosis | None]:
    found = find_run_or_record(run)
    if found.launcher:
        return found.name, diagnose_live_run(found.launcher, found.name)
    events = found.recorded_run.load_events()
    nodes = sorted({str(event.data.get("node")) for event in events if event.kind == EVENT_NODE_JOINED})
    lines = found.recorded_run.load_log_lines(newest_only=True)
    return found.name, diagnose_failure(found.name, events, [TaskState(node, "", "down") for node in nodes], lines)


def diagnose_live_run(launcher: Launcher, run: str) -> FailureDiagnosis | None:
    """Return the diagnosis of an existing run that failed or restarted its ranks; None if nothing has failed.

    Raises RunNotFound if there is no such run.
    """
    events = load_live_run_events(launcher, run)
    tasks = launcher.list_tasks(run)
    first = find_root_cause(events, tasks)
    since = first.time - LINES_BEFORE_SECONDS if first else None
    lines = launcher.stream_logs(run, follow=False, tail=_TAIL_LINES, since=since)
    return diagnose_failure(run, events, tasks, lines)


def list_known_runs() -> list[RunRow]:
    """Return a summary of each run of the reachable launchers, and of each run with events stored on this machine.

    Runs that continue each other, because they resumed the same checkpoints, have one summary.
    """
    now, live_ids = time.time(), set()
    live_summaries = []
    for launcher, run in discover_runs()[1]:
        recorded_run = find_recorded_run_of(launcher, run)
        live_ids.add(recorded_run.identity.id)
        events = load_live_run_events(launcher, run)
        state = build_status(run, events, launcher.list_tasks(run), now).state
        live_summaries.append(history.summarize_run(run, recorded_run.identity, events, state, now))
    past_runs = [recorded_run for recorded_run in list_recorded_runs() if recorded_run.identity.id not in live_ids]
    past_summaries = [summary for recorded_run in past_runs if (summary := summarize_past_run(recorded_run)) is not None]
    return history.merge_continued_runs([*past_summaries, *live_summaries])


def summarize_past_run(recorded_run: RecordedRun) -> RunRow | None:
    """Return the summary of a run that is down, from its events on this machine; None for the doctor's probes, and without events.

    The summary is stored, and read again while the events stay the same: those of a long run take seconds to parse.
    """
    stored = recorded_run.load_summary()
    if stored is None:
        events = recorded_run.load_events()
        is_probe = any(event.kind == EVENT_NODE_PROBE for event in events)
        summary = history.summarize_run(recorded_run.name, recorded_run.identity, events, None, time.time())
        stored = asdict(summary) if events and not is_probe else {}
        recorded_run.save_summary(stored)
    return RunRow(**stored) if stored else None
