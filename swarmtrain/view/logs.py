"""Print the output of a run's nodes as one filtered stream: from the launcher, or from stored logs if the run is down."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from swarmtrain.errors import RunNotFound, SwarmtrainError
from swarmtrain.launchers.base import LogLine
from swarmtrain.launchers.common.history_store import RecordedRun
from swarmtrain.launchers.run_discovery import find_run_or_record
from swarmtrain.protocol import RENDEZVOUS_SERVICE
from swarmtrain.view.console import print_message
from swarmtrain.view.update_printer import print_log_line


@dataclass(frozen=True)
class LogFilter:
    """Filter of log lines. `tail`: number of last lines per node, applied before `rank` and `pattern`; `since`: seconds since the epoch."""

    tail: int | None = None
    since: float | None = None
    node: str | None = None
    rank: int | None = None
    pattern: re.Pattern[str] | None = None

    def __contains__(self, line: LogLine) -> bool:
        return self.rank in (None, line.rank) and (self.pattern is None or self.pattern.search(line.text) is not None)


def compile_pattern(text: str | None) -> re.Pattern[str] | None:
    """Return the compiled regular expression `text`; None if `text` is None. Raises SwarmtrainError if it is invalid."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise SwarmtrainError(
            f"`{text}` is not a regular expression: {error}", place="--grep", hint="escape each of ( [ * + ? with \\"
        ) from None


def print_logs(run: str | None, log_filter: LogFilter, *, follow: bool, as_json: bool = False) -> None:
    """Print the lines that `log_filter` selects, each as a JSON object if `as_json`; with `follow`, continue until the run ends.

    A progress bar is one line of the output, with its last state; with `follow`, its states are printed, too.
    For a run that is down, the output stored on this machine is printed. Raises SwarmtrainError if the run or the node is unknown, or the
    output cannot be read.
    """
    for line in _read_log_lines(run, log_filter, follow=follow):
        if line in log_filter and (follow or not line.is_interim):
            print(json.dumps(asdict(line)), flush=True) if as_json else print_log_line(line)  # noqa: T201  # a line of output


def _read_log_lines(run: str | None, log_filter: LogFilter, *, follow: bool) -> Iterator[LogLine]:
    found = find_run_or_record(run)
    launcher, run_name = found.launcher, found.name
    if launcher is None:
        if found.error and not found.recorded_run.has_logs:
            raise found.error
        reason = f"{run_name} is down" if isinstance(found.error, RunNotFound) else str(found.error)
        print_message(f"{reason}; showing its saved output from {found.recorded_run.folder}")
        return _read_stored_log_lines(found.recorded_run, log_filter)
    nodes = [task.node for task in launcher.list_tasks(run_name) if task.node != RENDEZVOUS_SERVICE]
    if log_filter.node is not None and log_filter.node not in nodes:
        raise SwarmtrainError(
            f"unknown node; available nodes: {', '.join(nodes)}", place=f"run {run_name}", hint=f"swarmtrain status {run_name}"
        )
    return launcher.stream_logs(
        run_name, follow=follow, tail=log_filter.tail, since=log_filter.since, node=log_filter.node, report_progress=print_message
    )


def _read_stored_log_lines(recorded_run: RecordedRun, log_filter: LogFilter) -> Iterator[LogLine]:
    lines = (line for line in recorded_run.load_log_lines(node=log_filter.node) if line.time >= (log_filter.since or 0.0))
    if log_filter.tail is None:
        yield from lines
        return
    last_lines: dict[str, deque[LogLine]] = {}
    for line in lines:
        last_lines.setdefault(line.node, deque(maxlen=log_filter.tail)).append(line)
    yield from sorted((line for node_lines in last_lines.values() for line in node_lines), key=lambda line: line.time)
