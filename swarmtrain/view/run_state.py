"""State of a run: its launcher's current report, combined with earlier events that were stored on this machine."""

from __future__ import annotations

import time
from dataclasses import asdict

from swarmtrain.errors import EngineError, RunNotFound, StateDirectoryError
from swarmtrain.launchers.base import Launcher, TaskState
from swarmtrain.launchers.common import history_store
from swarmtrain.launchers.registry import discover_runs, find_run
from swarmtrain.protocol import EVENT_NODE_JOINED, EVENT_NODE_PROBE, Event
from swarmtrain.view import history
from swarmtrain.view.console import print_message
from swarmtrain.view.live_status import watch_status
from swarmtrain.view.output import print_json, print_result
from swarmtrain.view.status import RunStatus, build_status
from swarmtrain.view.why import LINES_BEFORE_SECONDS, FailureDiagnosis, diagnose_failure, find_first_failure

_TAIL_LINES = 2000
"""Number of last output lines of each node that are searched for the cause of a failure."""


def load_status(launcher: Launcher, run: str) -> RunStatus:
    """Return the current status of `run`. Raises RunNotFound if there is no such run."""
    return build_status(run, load_live_run_events(launcher, run), launcher.list_tasks(run), time.time())


def load_live_run_events(launcher: Launcher, run: str) -> list[Event]:
    """Return all events of an existing run; events that its coordinator no longer stores are read from this machine's store.

    Raises RunNotFound if there is no such run.
    """
    reported = launcher.read_events(run)
    return history_store.merge_events(history_store.select_events_since_teardown(history_store.load_events(run)), reported)


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

    def poll_status(self) -> RunStatus:
        """Return the current status of the run. Raises RunNotFound if there is no such run."""
        since = self._events[-1].time - self._OVERLAP_SECONDS if self._events else None
        new_events = load_live_run_events(self._launcher, self._run) if since is None else self._launcher.read_events(self._run, since)
        self._events = history_store.merge_events(self._events, new_events)
        return build_status(self._run, self._events, self._launcher.list_tasks(self._run), time.time())


def show_history(run: str | None, *, as_json: bool) -> None:
    """Print the history of `run`; if it is None, the list of known runs. Raises RunNotFound if there is no such run."""
    if run is None:
        print_result(history.build_run_list(list_known_runs()), as_json=as_json)
        return
    events = history_store.merge_events(history_store.load_main_events(run), ())
    try:
        launcher, run_name = find_run(run)
        events = history_store.merge_events(events, launcher.read_events(run_name))
    except (RunNotFound, EngineError, StateDirectoryError):
        if not events:
            raise
    print_result(history.build_history(run, events), as_json=as_json)


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
    try:
        launcher, name = find_run(run)
        return name, diagnose_live_run(launcher, name)
    except (RunNotFound, EngineError, StateDirectoryError):
        if run is None or not history_store.load_events(run):
            raise
    events = history_store.merge_events(history_store.select_last_deployment_events(history_store.load_events(run)), ())
    nodes = sorted({str(event.data.get("node")) for event in events if event.kind == EVENT_NODE_JOINED})
    return run, diagnose_failure(
        run, events, [TaskState(node, "", "down") for node in nodes], history_store.load_log_lines(run, newest_only=True)
    )


def diagnose_live_run(launcher: Launcher, run: str) -> FailureDiagnosis | None:
    """Return the diagnosis of an existing run that failed or restarted its ranks; None if nothing has failed.

    Raises RunNotFound if there is no such run.
    """
    events = load_live_run_events(launcher, run)
    first = find_first_failure(events)
    since = first.time - LINES_BEFORE_SECONDS if first else None
    lines = launcher.stream_logs(run, follow=False, tail=_TAIL_LINES, since=since)
    return diagnose_failure(run, events, launcher.list_tasks(run), lines)


def list_known_runs() -> list[history.RunSummary]:
    """Return a summary of each run of the reachable launchers, and of each run with events stored on this machine."""
    now = time.time()
    live_runs = {run: launcher for launcher, run in discover_runs()[1]}
    past_runs = [run for run in history_store.list_recorded_runs() if run not in live_runs]
    summaries = [summary for run in past_runs if (summary := summarize_past_run(run)) is not None]
    for run, launcher in live_runs.items():
        events = load_live_run_events(launcher, run)
        state = build_status(run, events, launcher.list_tasks(run), now).state
        summaries.append(history.summarize_run(run, events, state, now))
    return summaries


def summarize_past_run(run: str) -> history.RunSummary | None:
    """Return the summary of a run that is down, from its events on this machine; None for the doctor's probes.

    The summary is stored, and read again while the events stay the same: those of a long run take seconds to parse.
    """
    stored = history_store.load_summary(run)
    if stored is None:
        events = history_store.select_last_deployment_events(history_store.load_events(run))
        is_probe = any(event.kind == EVENT_NODE_PROBE for event in events)
        stored = {} if is_probe else asdict(history.summarize_run(run, events, None, time.time()))
        history_store.save_summary(run, stored)
    return history.RunSummary(**stored) if stored else None
