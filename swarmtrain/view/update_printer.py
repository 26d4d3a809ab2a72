"""Print the updates of a launcher's `watch`: the ranks' output to stdout, events to stderr."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from swarmtrain import protocol
from swarmtrain.failure_text import format_failure
from swarmtrain.launchers.base import LogLine, RunUpdate, TaskState
from swarmtrain.launchers.task_words import format_task_state
from swarmtrain.protocol import Event, RunOutcome
from swarmtrain.view.console import has_color_support, print_message
from swarmtrain.view.formatting import format_clock_time, format_count, format_duration, format_loss, remove_control_characters
from swarmtrain.view.progress_bar import show_progress_bar
from swarmtrain.view.worlds import build_connecting_ranks

_MAX_RECENT_LINES = 200
_KINDS_THAT_RANKS_LOG = (protocol.EVENT_RESUMED, protocol.EVENT_EVALUATION, protocol.EVENT_CHECKPOINT)
"""Kinds of events of which the trainer also logs a line with the same content."""
_NODE_COLORS = (36, 33, 32, 35, 34, 31)


def follow_updates(updates: Iterable[RunUpdate], *, after: float = 0.0) -> RunOutcome | None:
    """Print `updates` as they arrive, with a progress bar on a terminal. Return the outcome; None if the run disappears without one.

    Events until the time `after` (seconds since the epoch, by the coordinator's clock) are not printed: they are from before the deploy.
    Neither is an event that repeats a line of the ranks' output.
    """
    outcome = None
    printed_tasks: dict[str, str] = {}
    recent_lines: deque[str] = deque(maxlen=_MAX_RECENT_LINES)
    with show_progress_bar() as update_bar:
        for update in updates:
            if isinstance(update, LogLine):
                print_log_line(update)
                recent_lines.append(update.text)
            elif isinstance(update, TaskState):
                _print_task_state(update, printed_tasks)
            else:
                update_bar(update)
                if update.kind == protocol.EVENT_OUTCOME:
                    outcome = RunOutcome(**update.data)
                is_reason_printed_later = outcome is not None and not outcome.is_success
                if update.time > after and not is_reason_printed_later and not _is_in_output(update, recent_lines):
                    _print_event(update)
    return outcome


def print_log_line(line: LogLine) -> None:
    """Print a line of output with its node and rank as prefix."""
    prefix = f"{line.node} rank {line.rank}" if line.rank is not None else line.node
    if has_color_support(1):
        digits = "".join(char for char in line.node if char.isdigit())
        prefix = f"\033[{_NODE_COLORS[int(digits or 0) % len(_NODE_COLORS)]}m{prefix}\033[0m"
    print(f"{prefix} | {remove_control_characters(line.text)}", file=sys.stdout, flush=True)  # noqa: T201  # this is the place that prints


def format_event(event: Event) -> str | None:
    """Return `event` as a line of text; None for an event kind that is not printed, such as progress."""
    template = _EVENT_FORMATTERS.get(event.kind)
    return remove_control_characters(template(event.data)) if template else None


def _print_event(event: Event) -> None:
    line = format_event(event)
    if line:
        print_message(f"· {format_clock_time(event.time)} {line}")


def _is_in_output(event: Event, recent_lines: Iterable[str]) -> bool:
    """Return whether the output of the ranks contains what `event` says."""
    if event.kind in _KINDS_THAT_RANKS_LOG:
        return True
    message = str(event.data.get("message") or "")
    return event.kind in (protocol.EVENT_NOTE, protocol.EVENT_STRAGGLER) and bool(message) and any(message in line for line in recent_lines)


def _print_task_state(task: TaskState, printed_tasks: dict[str, str]) -> None:
    line = format_task_state(task)
    if task.reason and printed_tasks.get(task.node) != line:
        print_message(f"· {format_clock_time(time.time())} {remove_control_characters(line)}")
    printed_tasks[task.node] = line


def _format_finished_event(data: dict[str, Any]) -> str:
    line = f"finished at step {data.get('step')}"
    if (before := data.get("initial_validation_loss")) is not None and (after := data.get("final_validation_loss")) is not None:
        line += f": validation loss {before:.2f} → {after:.2f}"
    if (baseline := data.get("bigram_baseline_loss")) is not None:
        line += f", byte-bigram baseline {baseline:.2f}"
    return line


_EVENT_FORMATTERS: dict[str, Callable[[dict[str, Any]], str]] = {
    protocol.EVENT_NODE_JOINED: lambda data: f"{data.get('node')} joined, at {data.get('address')} on interface {data.get('interface')}",
    protocol.EVENT_WORLD_FORMED: lambda data: (
        f"a world of {format_count(data.get('world_size'), 'rank')} on {format_count(data.get('nodes'), 'node')} has formed"
    ),
    protocol.EVENT_RANKS_CONNECTING: lambda data: str(build_connecting_ranks(data) or "all ranks have connected"),
    protocol.EVENT_RESUMED: lambda data: f"resumed at step {data.get('step')} from {data.get('path')}",
    protocol.EVENT_EVALUATION: lambda data: f"validation loss {format_loss(data.get('loss'))} at step {data.get('step')}",
    protocol.EVENT_CHECKPOINT: lambda data: (
        f"saved step {data.get('step')} in {format_duration(data.get('seconds', 0))}: {data.get('path')}"
    ),
    protocol.EVENT_FAILURE: format_failure,
    protocol.EVENT_NOTE: lambda data: f"{data.get('node', 'trainer')}: {data.get('message')}",
    protocol.EVENT_GPU_FAULT: lambda data: f"{data.get('node')}: {data.get('message')}",
    protocol.EVENT_NODE_QUARANTINED: lambda data: (
        f"{data.get('node')} is quarantined for {format_duration(data.get('seconds', 0))}: {data.get('reason')}"
    ),
    protocol.EVENT_NODE_RELEASED: lambda data: f"{data.get('node')} is no longer quarantined: {data.get('reason')}",
    protocol.EVENT_DISK_NEARLY_FULL: lambda data: str(data.get("message")),
    protocol.EVENT_STRAGGLER: lambda data: str(data.get("message")),
    protocol.EVENT_TRAINING_FINISHED: _format_finished_event,
    protocol.EVENT_OUTCOME: lambda data: f"{data.get('status')}: {data.get('reason')}",
}
