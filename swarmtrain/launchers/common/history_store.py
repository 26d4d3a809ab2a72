"""History of runs in the user's state directory, needed because Swarm deletes a container's log, and a removed run has no log.

    RUN/history/ID/events.jsonl    the coordinator's events, and the operations requested on this machine; events.N.jsonl is older
    RUN/history/ID/NODE.log        a node's output; NODE.1.log is older
    RUN/history/ID/identity.json   the run's owner, the machine from which it was deployed, and when
    RUN/history/ID/summary.json    summary of the events, for the list of runs
    RUN/history/ID/config.json     the config of the last deploy, without the values of environment variables
    RUN/history/ID/code.diff       diff of the project against its git commit at the last deploy

A name can be used again for another run; the id (swarmtrain.protocol.run_identity) tells them apart. The history is only shown to
users: no decision depends on it.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from swarmtrain import __version__
from swarmtrain.atomic_file import SECRET_MODE, create_private_folder, open_private_file, write_text_atomically
from swarmtrain.config import Config
from swarmtrain.launchers.base import LogLine
from swarmtrain.protocol import EVENT_OPERATION, EVENT_PROGRESS, EVENT_RESUMED, EVENT_USAGE, INTERIM_SUFFIX, RENDEZVOUS_SERVICE, Event
from swarmtrain.protocol.run_identity import RunIdentity

EVENTS_FILE, DIFF_FILE, HISTORY_FOLDER = "events.jsonl", "code.diff", "history"
TIMESTAMP_PATTERN = re.compile(r"(\d{4}-\d\d-\d\dT\S+Z) ")
"""Pattern of the time at the start of a line of a log, in Docker's format."""
_SUMMARY_FILE, _IDENTITY_FILE, _CONFIG_FILE = "summary.json", "identity.json", "config.json"
_EVENT_HEAD_PATTERN = re.compile(r'\{"event": "[^"]*", "time": (\d+(?:\.\d+)?)')
_PROGRESS_LINE_PREFIX, _USAGE_LINE_PREFIX = f'{{"event": "{EVENT_PROGRESS}"', f'{{"event": "{EVENT_USAGE}"'
_RESUMED_LINE_PREFIX = f'{{"event": "{EVENT_RESUMED}"'
_RANK_PATTERN = re.compile(r"\[rank (\d+)\] ?")
_RECORD_PATTERNS = ("events*.jsonl", "node*.log")
_ROTATED_PATTERN = re.compile(r"\.(\d+)\.(log|jsonl)$")


def resolve_state_directory() -> Path:
    """Return swarmtrain's state directory, which contains a folder for each run name: by default ~/.local/state/swarmtrain."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "swarmtrain"


def resolve_run_folder(run: str) -> Path:
    """Return the folder of the runs with the name `run`, which need not exist."""
    return resolve_state_directory() / run


def create_run_folder(run: str) -> Path:
    """Return the folder of the runs with the name `run`, created if necessary; only its owner can read it. Raises OSError."""
    for folder in (resolve_state_directory(), resolve_run_folder(run)):
        create_private_folder(folder)
    return resolve_run_folder(run)


@dataclass(frozen=True)
class RecordedRun:
    """The records of one run on this machine: its events, its output, and its summary. They need not exist yet."""

    name: str
    identity: RunIdentity

    @property
    def folder(self) -> Path:
        return resolve_run_folder(self.name) / HISTORY_FOLDER / self.identity.id

    @property
    def has_logs(self) -> bool:
        """Whether any output of the run's nodes is recorded on this machine."""
        return any(self.folder.glob("node*.log"))

    @property
    def was_taken_down(self) -> bool:
        """Whether the last event that is recorded of the run is its removal from this machine."""
        events = self.load_events()
        return bool(events) and events[-1].kind == EVENT_OPERATION and events[-1].data.get("operation") == "down"

    @property
    def original_id(self) -> str:
        """Id of the run that this run continues, because it has resumed that run's checkpoints; its own id if it continues none."""
        resumptions = (Event.from_line(line) for line in self._read_event_lines() if line.startswith(_RESUMED_LINE_PREFIX))
        first = next((event for event in resumptions if event), None)
        return str(first.data.get("run_id") or self.identity.id) if first else self.identity.id

    @property
    def changed_at(self) -> float:
        """Time at which the records were last written, in seconds since the epoch; 0 if there are none."""
        files = (path for pattern in _RECORD_PATTERNS for path in self.folder.glob(pattern))
        return max((path.stat().st_mtime for path in files), default=0.0)

    def create_folder(self) -> None:
        """Create the folder of the records, with the run's identity. Raises OSError."""
        if not (self.folder / _IDENTITY_FILE).exists():
            create_run_folder(self.name)
            create_private_folder(self.folder)
            write_text_atomically(self.folder / _IDENTITY_FILE, json.dumps(asdict(self.identity)), mode=SECRET_MODE)

    def load_events(self) -> list[Event]:
        """Return the run's recorded events, ordered by time."""
        return merge_events(parse_events(self._read_event_lines()), ())

    def load_main_events(self) -> list[Event]:
        """Return the run's recorded events without resource usage, and without each progress event that progress or usage follows.

        A long run has hundreds of thousands of these, whose lines are not parsed.
        """
        return merge_events(parse_events(_drop_routine_lines(self._read_event_lines())), ())

    def load_summary(self) -> dict[str, Any] | None:
        """Return the stored summary of the run; None if there is none, or if it was made from other events or by another version."""
        try:
            stored = json.loads((self.folder / _SUMMARY_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        is_current = isinstance(stored, dict) and stored.get("source") == self._describe_event_files()
        return stored.get("summary") if is_current else None

    def save_summary(self, summary: Mapping[str, Any]) -> None:
        """Store the summary of the run's present events. An OSError is ignored."""
        text = json.dumps({"source": self._describe_event_files(), "summary": summary})
        with contextlib.suppress(OSError):
            write_text_atomically(self.folder / _SUMMARY_FILE, text, mode=SECRET_MODE)

    def load_log_lines(self, *, node: str | None = None, newest_only: bool = False) -> Iterator[LogLine]:
        """Yield the recorded output of all nodes, or of `node`, ordered by time. Lines without a timestamp come first.

        With `newest_only`, only the newest file of each node is read.
        """
        logs: dict[str, list[Path]] = {}
        for path in sorted(self.folder.glob("*.log"), key=_get_age_sort_key):
            logs.setdefault(path.name.partition(".")[0], []).append(path)
        logs.pop(RENDEZVOUS_SERVICE, None)
        selected = {name: files[-1:] if newest_only else files for name, files in sorted(logs.items()) if node in (None, name)}
        return heapq.merge(*(_read_node_log(name, files) for name, files in selected.items()), key=lambda line: line.time)

    def record_operation(self, event: Event) -> None:
        """Record the operation `event` (see build_operation_event). An OSError is ignored."""
        with contextlib.suppress(OSError):
            self.create_folder()
            with open_private_file(self.folder / EVENTS_FILE, "a") as file:
                file.write(event.to_line() + "\n")

    def save_git_diff(self, diff: str) -> None:
        """Save the diff of the user's project against its git commit, replacing the previous diff. An OSError is ignored."""
        with contextlib.suppress(OSError):
            self.create_folder()
            if diff:
                write_text_atomically(self.folder / DIFF_FILE, diff, mode=SECRET_MODE)
            else:
                (self.folder / DIFF_FILE).unlink(missing_ok=True)

    def save_config(self, config: Config) -> None:
        """Save the config of a deploy, replacing the previous one. An OSError is ignored."""
        with contextlib.suppress(OSError):
            self.create_folder()
            write_text_atomically(self.folder / _CONFIG_FILE, config.hide_environment().to_json(), mode=SECRET_MODE)

    def load_config(self) -> Config | None:
        """Return the config of the last deploy from this machine; None if none is recorded. Raises ValueError if it cannot be read."""
        try:
            text = (self.folder / _CONFIG_FILE).read_text(encoding="utf-8")
        except OSError:
            return None
        return Config.from_json(text)

    def _read_event_lines(self) -> Iterator[str]:
        for file in sorted(self.folder.glob("events*.jsonl"), key=_get_age_sort_key):
            yield from _read_file_lines(file)

    def _describe_event_files(self) -> list[Any]:
        """Return a value that changes with the files of the run's events, and with the version of swarmtrain."""
        files = {path.name: path.stat() for path in self.folder.glob("events*.jsonl")}
        return [__version__, *([name, status.st_size, status.st_mtime_ns] for name, status in sorted(files.items()))]


def list_recorded_runs(name: str | None = None) -> list[RecordedRun]:
    """Return the runs with events or output recorded on this machine, with the name `name` or all, the most recently changed last."""
    state_directory = resolve_state_directory()
    folders = {path.parent for pattern in _RECORD_PATTERNS for path in state_directory.glob(f"*/{HISTORY_FOLDER}/*/{pattern}")}
    runs = [run for folder in folders if (run := _load_recorded_run(folder)).name == name or name is None]
    return sorted(runs, key=lambda run: (run.changed_at, run.name))


def find_recorded_run(name_or_id: str) -> RecordedRun | None:
    """Return the most recently changed run with this name, or else the run with this id; None if none is recorded on this machine."""
    runs = list_recorded_runs(name_or_id) or [run for run in list_recorded_runs() if run.identity.id == name_or_id]
    return runs[-1] if runs else None


def list_continued_runs(run: RecordedRun) -> list[RecordedRun]:
    """Return `run` and the runs that it continues, oldest first: those of its name that wrote, or resumed, the same checkpoints."""
    original_id = run.original_id
    others = [other for other in list_recorded_runs(run.name) if other.identity.id != run.identity.id]
    return [*(other for other in others if original_id in (other.identity.id, other.original_id)), run]


def build_operation_event(operation: str, **details: object) -> Event:
    """Return the event of an operation (up, stop or down) that is requested on this machine now."""
    return Event(EVENT_OPERATION, {"operation": operation, **details})


def parse_events(lines: Iterable[str], since: float = 0.0) -> Iterator[Event]:
    """Yield the events in `lines` from `since` on, in seconds since the epoch; older events are skipped without parsing them."""
    for line in lines:
        head = _EVENT_HEAD_PATTERN.match(line)
        if head and float(head[1]) >= since and (event := Event.from_line(line)):
            yield event


def merge_events(recorded_events: Iterable[Event], live_events: Iterable[Event]) -> list[Event]:
    """Return the events of both lists, without duplicates, ordered by time."""
    return sorted({event.to_line(): event for event in (*recorded_events, *live_events)}.values(), key=lambda event: event.time)


def parse_log_line(node: str, text: str, timestamp: float = 0.0) -> LogLine:
    """Return the text of one line of a node's log as a LogLine, with its rank if a rank wrote it."""
    match, content = _RANK_PATTERN.match(text), text.removesuffix(INTERIM_SUFFIX)
    return LogLine(node, content[match.end() :] if match else content, int(match[1]) if match else None, timestamp, content != text)


def parse_timestamped_log_line(node: str, text: str, previous_timestamp: float = 0.0) -> LogLine:
    """Return a line of a log file as a LogLine, with the timestamp at the start of the line.

    Without a timestamp in the line, `previous_timestamp` (seconds since the epoch) is used.
    """
    match = TIMESTAMP_PATTERN.match(text)
    return (
        parse_log_line(node, text[match.end() :], datetime.fromisoformat(match[1]).timestamp())
        if match
        else parse_log_line(node, text, previous_timestamp)
    )


def _load_recorded_run(folder: Path) -> RecordedRun:
    try:
        identity = RunIdentity(**json.loads((folder / _IDENTITY_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # written by another version of swarmtrain
        identity = RunIdentity(folder.name)
    return RecordedRun(folder.parent.parent.name, identity)


def _read_node_log(node: str, files: list[Path]) -> Iterator[LogLine]:
    previous_timestamp = 0.0
    for file in files:
        for text in _read_file_lines(file):
            line = parse_timestamped_log_line(node, text, previous_timestamp)
            previous_timestamp = line.time
            yield line


def _drop_routine_lines(lines: Iterable[str]) -> Iterator[str]:
    for line, next_line in pairwise(chain(lines, [""])):
        is_superseded = line.startswith(_PROGRESS_LINE_PREFIX) and next_line.startswith((_PROGRESS_LINE_PREFIX, _USAGE_LINE_PREFIX))
        if not is_superseded and not line.startswith(_USAGE_LINE_PREFIX):
            yield line


def _read_file_lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            for line in stream:
                yield line.rstrip("\r\n")
    except OSError:
        return


def _get_age_sort_key(file: Path) -> tuple[bool, int]:
    """Return a sort key that puts older files first: rotated files by their number, then the file that is still written."""
    match = _ROTATED_PATTERN.search(file.name)
    return (match is None, int(match[1]) if match else 0)
