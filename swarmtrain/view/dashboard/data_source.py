"""Data source of a run's dashboard: polls a live run for new data only, or reads the stored data of a run that is down."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice

from swarmtrain import protocol
from swarmtrain.config import Config
from swarmtrain.errors import EngineError, HostError, RunNotFound, StackError, StateDirectoryError, SwarmtrainError
from swarmtrain.launchers.base import Launcher, LogLine, TaskState
from swarmtrain.launchers.common.history_store import RecordedRun, find_recorded_run
from swarmtrain.launchers.registry import load_deployment
from swarmtrain.launchers.run_discovery import find_run_or_record
from swarmtrain.planning.plan import build_probe_run_name
from swarmtrain.protocol import Event
from swarmtrain.view.dashboard.event_timeline import EventAccumulator
from swarmtrain.view.dashboard.page_data import PageData, build_output_line_data, build_page_data
from swarmtrain.view.run_state import load_live_run_events

POLL_SECONDS = 1.5
"""Minimum seconds between two polls of a run, independent of the number of clients that view its page."""
MAX_LINES = 4000
"""Maximum number of output lines that are kept."""
_TAIL_LINES = 500
_CONFIG_SECONDS = 30.0
"""Seconds for which the config of a run is not read again: that reads its code, too."""
_FOLLOW_SECONDS = 60.0
"""Seconds for which the output is followed after the last request for output lines."""
_OVERLAP_SECONDS = 60.0
_UNREACHABLE_ERRORS = (EngineError, HostError, StateDirectoryError)


class RunDataSource:
    """Provide the page data and output lines of one run; thread-safe. `launcher` is None for a run that is down."""

    def __init__(self, recorded_run: RecordedRun, launcher: Launcher | None) -> None:
        self.run = recorded_run.name
        self._recorded_run, self._launcher = recorded_run, launcher
        self._poll_lock = threading.Lock()
        self._lines_lock = threading.Lock()
        """Guards the output lines, which also arrive while no client polls."""
        self._accumulator = EventAccumulator()
        self._recent_events: dict[str, float] = {}
        self._newest_time = 0.0
        self._tasks: list[TaskState] = []
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._line_count = 0
        self._lines_requested_at = 0.0
        self._connection_error = ""
        self._polled_at = self._answered_at = 0.0
        self._page_data: PageData = {}
        self._config: Config | None = None
        self._config_read_at = 0.0
        self._listener: threading.Thread | None = None
        probe = find_recorded_run(build_probe_run_name(self.run))
        self._add_events(event for event in (probe.load_events() if probe else ()) if event.kind == protocol.EVENT_LINK)
        self._recent_events.clear()
        self._newest_time = 0.0

    @property
    def title(self) -> str:
        """What the page shows: the name of the run."""
        return self.run

    def get_page_data(self) -> PageData:
        """Return the current page data. If they are outdated, their field `connection_error` contains the reason.

        Raises SwarmtrainError if no data could be read since the start. While one thread waits for a slow manager, all other threads
        receive the previous data.
        """
        if self._poll_lock.acquire(blocking=not self._page_data):
            try:
                if not self._page_data or (self._launcher and time.monotonic() - self._polled_at > POLL_SECONDS):
                    self._refresh_page_data()
                    self._polled_at = time.monotonic()
            finally:
                self._poll_lock.release()
        return self._page_data

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._recorded_run.identity.id

    def use_launcher(self, launcher: Launcher | None) -> None:
        """Use another launcher of the same run, if there is one, from the next poll on. The previous one may have lost its connection."""
        self._launcher = launcher or self._launcher

    def load_config(self) -> Config:
        """Return the config of the run, without the values of environment variables: the deployed one, or for a run that is down, that
        of the last deploy from this machine. Raises StackError if there is none, or if it cannot be read, and the errors of the launcher.
        """
        if launcher := self._launcher:
            if self._config is None or time.monotonic() - self._config_read_at > _CONFIG_SECONDS:
                self._check_identity(launcher)
                self._config = load_deployment(launcher, self.run)[0].hide_environment()
                self._config_read_at = time.monotonic()
            return self._config
        place = f"run {self.run}"
        try:
            config = self._recorded_run.load_config()
        except ValueError:  # raised by pydantic
            raise StackError("its config was recorded by another version of swarmtrain", place=place) from None
        if config is None:
            raise StackError("it is down, and its config is not recorded on this machine", place=place)
        return config

    def compute_data_age(self) -> float:
        """Return the seconds since the last successful poll of the run; 0 for a run that is down, which has no new data."""
        return time.monotonic() - self._answered_at if self._launcher else 0.0

    def get_output_lines(self, after_number: int = 0) -> tuple[list[PageData], int]:
        """Return the retained output lines after line number `after_number`, and the number of the last line."""
        self._lines_requested_at = time.monotonic()
        self._ensure_output_reader_running()
        with self._lines_lock:
            skipped = max(0, after_number - (self._line_count - len(self._lines)))
            return [build_output_line_data(line) for line in islice(self._lines, skipped, None)], self._line_count

    def read_last_output_lines(self) -> list[PageData]:
        """Return the last output lines of all nodes, without following the output. Raises SwarmtrainError if they cannot be read."""
        if self._launcher is None:
            self.get_page_data()
            return self.get_output_lines()[0]
        self._check_identity(self._launcher)
        last_lines = list(self._launcher.stream_logs(self.run, follow=False, tail=_TAIL_LINES))
        for line in last_lines:
            self._append_output_line(line)
        return [build_output_line_data(line) for line in last_lines]

    def _refresh_page_data(self) -> None:
        if self._launcher is None:
            self._load_stored_run()
        else:
            try:
                self._poll_launcher(self._launcher)
                self._connection_error, self._answered_at = "", time.monotonic()
            except RunNotFound:
                if not self._page_data:
                    raise
                self._launcher = None
                self._tasks = [TaskState(task.node, task.host, "down") for task in self._tasks]
            except _UNREACHABLE_ERRORS as error:
                if not self._page_data:
                    raise
                self._connection_error = str(error)
        with self._lines_lock:
            lines = list(self._lines)
        self._page_data = {
            **build_page_data(self.run, self._accumulator, self._tasks, lines, time.time()),
            "connection_error": self._connection_error,
        }

    def _poll_launcher(self, launcher: Launcher) -> None:
        events = (
            launcher.read_events(self.run, self._newest_time - _OVERLAP_SECONDS)
            if self._newest_time
            else load_live_run_events(launcher, self.run)
        )
        tasks = launcher.list_tasks(self.run)
        self._check_identity(launcher)  # after reading: the run could be replaced in between
        self._add_events(events)
        self._tasks = tasks

    def _check_identity(self, launcher: Launcher) -> None:
        """Raise RunNotFound if the run of this name is another one, which was deployed after this one was removed."""
        if launcher.read_identity(self.run).id != self.run_id:
            raise RunNotFound("was removed; another run has its name now", place=f"run {self.run}")

    def _load_stored_run(self) -> None:
        if self._page_data:
            return
        events = self._recorded_run.load_events()
        self._add_events(events)
        nodes = sorted({str(event.data.get("node")) for event in events if event.kind == protocol.EVENT_NODE_JOINED})
        self._tasks = [TaskState(node, "", "down") for node in nodes]
        for line in self._recorded_run.load_log_lines():
            self._append_output_line(line)

    def _add_events(self, events: Iterable[Event]) -> None:
        """Add new events. An event that was read before is recognized by its line and skipped."""
        for event in events:
            line = event.to_line()
            if line in self._recent_events:
                continue
            self._recent_events[line] = event.time
            self._newest_time = max(self._newest_time, event.time)
            self._accumulator.add_event(event)
        oldest = self._newest_time - 2 * _OVERLAP_SECONDS
        self._recent_events = {line: event_time for line, event_time in self._recent_events.items() if event_time > oldest}

    def _append_output_line(self, line: LogLine) -> None:
        self._lines.append(line)
        self._line_count += 1

    def _ensure_output_reader_running(self) -> None:
        """Start the thread that reads the output, unless it is already running or the run is down."""
        with self._lines_lock:
            if self._launcher is None or (self._listener and self._listener.is_alive()):
                return
            self._listener = threading.Thread(target=self._read_output, args=(self._launcher,), name="output", daemon=True)
            self._listener.start()

    def _read_output(self, launcher: Launcher) -> None:
        """Follow the output, from the last line on, until no client has requested lines for a while. The next line ends it then."""
        last_time = self._lines[-1].time if self._lines else 0.0
        try:
            self._check_identity(launcher)
            for line in launcher.stream_logs(self.run, follow=True, tail=None if last_time else _TAIL_LINES, since=last_time or None):
                if time.monotonic() - self._lines_requested_at > _FOLLOW_SECONDS:
                    break
                if not last_time or line.time > last_time:
                    with self._lines_lock:
                        self._append_output_line(line)
        except SwarmtrainError:
            pass  # the page shows that the run is unreachable; the next request for lines retries
        time.sleep(POLL_SECONDS)


def open_data_source(run: str | None) -> RunDataSource:
    """Return the data source of `run`; None means the only run. Raises RunNotFound if the run neither exists nor has stored data."""
    found = find_run_or_record(run)
    return RunDataSource(found.recorded_run, found.launcher)
