"""The stream of updates that a launcher's `watch` yields, as lines: ranks' output to stdout, what happened to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from swarmtrain import wire
from swarmtrain.launchers.base import LogLine, TaskState, Update
from swarmtrain.view.bar import below
from swarmtrain.view.console import coloured, say
from swarmtrain.view.times import counted, duration
from swarmtrain.view.worlds import failure_line
from swarmtrain.wire import Event, Verdict

_COLOURS = (36, 33, 32, 35, 34, 31)


def follow(updates: Iterable[Update]) -> Verdict | None:
    """Print `updates` as they come, above a bar on a terminal, and return the verdict; None if the run went away without one."""
    verdict = None
    told: dict[str, str] = {}
    with below() as show:
        for update in updates:
            if isinstance(update, LogLine):
                show_line(update)
            elif isinstance(update, TaskState):
                _show_task(update, told)
            else:
                show(update)
                if update.kind == wire.VERDICT:
                    verdict = Verdict(**update.data)
                if verdict is None or verdict.done:  # why it failed is said at the end
                    _show_event(update)
    return verdict


def show_line(line: LogLine) -> None:
    """Print a line of output behind its node and rank."""
    who = f"{line.node} rank {line.rank}" if line.rank is not None else line.node
    if coloured(1):
        digits = "".join(char for char in line.node if char.isdigit())
        who = f"\033[{_COLOURS[int(digits or 0) % len(_COLOURS)]}m{who}\033[0m"
    print(f"{who} | {line.text}", file=sys.stdout, flush=True)  # noqa: T201  # this is the place that prints


def event_line(event: Event) -> str | None:
    """Return what a person wants to know of an event; None for those that the ranks' own output tells already."""
    template = _EVENTS.get(event.kind)
    return template(event.data) if template else None


def _show_event(event: Event) -> None:
    line = event_line(event)
    if line:
        say(f"· {line}")


def _show_task(task: TaskState, told: dict[str, str]) -> None:
    line = f"{task.node} on {task.host or 'no host yet'}: {task.state}{f', {task.reason}' if task.reason else ''}"
    if task.reason and told.get(task.node) != line:
        say(f"· {line}")
    told[task.node] = line


def _finished(data: dict[str, Any]) -> str:
    line = f"finished at step {data.get('step')}"
    if (before := data.get("loss_before")) is not None and (after := data.get("loss_after")) is not None:
        line += f": held-out loss {before:.2f} → {after:.2f}"
    if (baseline := data.get("baseline")) is not None:
        line += f", against {baseline:.2f} of a table of byte pairs"
    return line


_EVENTS: dict[str, Callable[[dict[str, Any]], str]] = {
    wire.JOINED: lambda data: f"{data.get('node')} is here, at {data.get('address')} by {data.get('interface')}",
    wire.WORLD: lambda data: f"a world of {counted(data.get('world_size'), 'rank')} on {counted(data.get('nodes'), 'node')} has formed",
    wire.RESUMED: lambda data: f"resumed at step {data.get('step')} from {data.get('path')}",
    wire.EVALUATION: lambda data: f"held-out loss {data.get('loss', float('nan')):.4f} at step {data.get('step')}",
    wire.CHECKPOINT: lambda data: f"saved step {data.get('step')} in {duration(data.get('seconds', 0))}: {data.get('path')}",
    wire.FAILURE: failure_line,
    wire.NOTE: lambda data: f"{data.get('node', 'trainer')}: {data.get('message')}",
    wire.LEFT_OUT: lambda data: f"{data.get('node')} is left out for {duration(data.get('seconds', 0))}: {data.get('why')}",
    wire.LET_IN: lambda data: f"{data.get('node')} may train again: {data.get('why')}",
    wire.STRAGGLER: lambda data: str(data.get("message")),
    wire.FINISHED: _finished,
    wire.VERDICT: lambda data: f"{data.get('status')}: {data.get('why')}",
}
