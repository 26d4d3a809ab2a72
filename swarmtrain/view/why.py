"""Events, task states and lines → why a run died: who was first, what killed it, what the others did, what to do. One screen."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain import wire
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.view.failures import Evidence, Known, recognise, signal_name
from swarmtrain.view.status import progress_line, remedy
from swarmtrain.view.times import clock, duration
from swarmtrain.view.worlds import failure_line, left_out, worlds
from swarmtrain.wire import Event, collateral

BEFORE = 60.0
"""Seconds before a death in which what was printed may tell of it."""
_AFTER = 2.0
_LAST = 8
_FRAMES = 16
_WIDTH = 160


@dataclass(frozen=True)
class Other:
    """What another node did when the first one died: its last line before, and its own failure if it had one."""

    node: str
    state: str
    failure: str
    last: str


@dataclass(frozen=True)
class Why:
    """Why a run died, or had to start its ranks anew the last time. `time` is in seconds since the epoch."""

    run: str
    verdict: str
    """What the board said at the end; empty if the run goes on."""
    node: str
    rank: int | None
    host: str
    time: float
    world: int
    progress: str
    error: str
    exit: str
    known: str
    means: str
    fix: str
    left_out: str
    """Until when its node is, and what can be done about that; empty if it is not."""
    traceback: str
    lines: tuple[str, ...]
    others: tuple[Other, ...]

    @property
    def who(self) -> str:
        return f"{self.node} rank {self.rank}" if self.rank is not None else self.node

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs, for --json."""
        return asdict(self)

    def __str__(self) -> str:
        where = (
            f"{self.who}{f' on {self.host}' if self.host else ''}, at {clock(self.time)}{f', in world {self.world}' if self.world else ''}"
        )
        facts = [
            ("first", where),
            ("step", self.progress),
            ("error", self.error),
            ("exit", self.exit),
            ("means", self.means),
            ("fix", self.fix),
            ("now", self.left_out),
        ]
        lines = [f"run {self.run}: {self.verdict or 'goes on after a failure'}", *(f"  {name:8}{text}" for name, text in facts if text)]
        lines += _block("traceback", self.traceback.splitlines()[-_FRAMES:])
        lines += _block(f"last lines of {self.who}", self.lines)
        lines += _block("meanwhile", [_other(other) for other in self.others])
        return "\n".join(lines)


def first_failure(events: Sequence[Event]) -> Event | None:
    """Return the failure by which the last world that failed began to: one that has its own reason, if any has."""
    groups: list[list[Event]] = [[]]
    for event in events:
        if event.kind == wire.WORLD:
            groups.append([])
        elif event.kind == wire.FAILURE:
            groups[-1].append(event)
    last = next((group for group in reversed(groups) if group), [])
    return next((event for event in last if not collateral(event.data)), last[0] if last else None)


def why(run: str, events: Sequence[Event], tasks: Sequence[TaskState], lines: Iterable[LogLine]) -> Why | None:
    """Return why `run` died; None if nothing of it has failed. `events` and `lines` are in the order of time."""
    first = first_failure(events) or _lost(events) or _refused(tasks, events)
    if first is None:
        return None
    data = first.data
    node, rank = str(data.get("node", "")), data.get("rank")
    # Lines of a file that some other program wrote have no time: they may be of any.
    said = [line for line in lines if not line.time or first.time - BEFORE < line.time < first.time + _AFTER]
    own = [line.text for line in said if line.node == node and rank in (None, line.rank)]
    host = next((task.host for task in tasks if task.node == node), "")
    out = left_out(events).get(node)
    reasons = [task.reason for task in tasks if task.node == node and task.reason]
    known = recognise(Evidence(data, "\n".join([*own[-_LAST:], *reasons])))
    before = [event for event in events if event.time <= first.time]
    made = next((event.data for event in reversed(before) if event.kind == wire.PROGRESS), None)
    verdict = next((event.data for event in reversed(events) if event.kind in (wire.VERDICT, wire.BOARD_UP)), {})
    return Why(
        run=run,
        verdict=f"{verdict['status']}, {verdict['why']}" if "status" in verdict else "",
        node=node,
        rank=rank,
        host=host,
        time=first.time,
        world=len(worlds(before)),
        progress=progress_line(made) if made else "",
        error=str(data.get("error", "")),
        exit=_exit(data),
        known=known.name if known else "",
        means=known.means if known else "",
        fix=_fix(data, known),
        left_out=f"{node} is left out until {clock(out.until)[11:16]}. {remedy(run, host)}" if out else "",
        traceback=str(data.get("traceback", "")),
        lines=tuple(_without(own, str(data.get("traceback", "")))[-_LAST:]),
        others=_others(node, first, events, tasks, said),
    )


def _fix(data: dict[str, Any], known: Known | None) -> str:
    """Return the next step: whoever failed may know it better than a table."""
    return str(data.get("hint") or (known.fix if known else ""))


def _exit(data: dict[str, Any]) -> str:
    """Return how the process ended, as a number and in words."""
    code = data.get("exit_code")
    if name := data.get("signal"):
        number = getattr(signal, str(name), None)
        return f"killed by {name}{f', {128 + number} to a shell' if number else ''}"
    if not isinstance(code, int):
        return ""
    name = signal_name(code - 128) if code > 128 else ""
    return f"exit code {code}{f', which is {name}' if name else ''}"


def _lost(events: Sequence[Event]) -> Event | None:
    """Return that a node fell silent, as the failure that nobody could tell of, if the run was given up for it."""
    verdict = next((event for event in reversed(events) if event.kind == wire.VERDICT), None)
    if verdict is None or verdict.data.get("status") == "done":
        return None
    silent = [event for event in events if event.kind == wire.LEFT and event.data.get("exit_code") is None]
    if not silent:
        return Event(
            wire.FAILURE,
            {"node": wire.RENDEZVOUS, "error": verdict.data.get("why"), "exit_code": verdict.data.get("exit_code")},
            verdict.time,
        )
    node = silent[-1].data.get("node")
    return Event(wire.FAILURE, {"node": node, "error": f"{node} fell silent: {verdict.data.get('why')}"}, silent[-1].time)


def _refused(tasks: Sequence[TaskState], events: Sequence[Event]) -> Event | None:
    """Return that a container could not be started, or ended before anybody in it could say why."""
    bad = [task for task in tasks if task.reason and task.state not in ("running", "complete", "stopped", "shutdown")]
    if not bad:
        return None
    data = {"node": bad[0].node, "error": bad[0].reason, "exit_code": bad[0].exit_code}
    return Event(wire.FAILURE, data, events[-1].time if events else 0.0)


def _others(node: str, first: Event, events: Sequence[Event], tasks: Sequence[TaskState], said: Sequence[LogLine]) -> tuple[Other, ...]:
    found = []
    for task in tasks:
        if task.node in (node, wire.RENDEZVOUS):
            continue
        failed = next(
            (event for event in events if event.kind == wire.FAILURE and event.data.get("node") == task.node and event.time >= first.time),
            None,
        )
        later = f"{failure_line(failed.data)}, {duration(failed.time - first.time)} later" if failed else ""
        last = next((line for line in reversed(said) if line.node == task.node and line.time <= first.time), None)
        when = f", {duration(first.time - last.time)} before" if last and last.time else ""
        found.append(Other(task.node, task.state, later, f"{last.text}{when}" if last else ""))
    return tuple(found)


def _other(other: Other) -> str:
    return f"{other.node} ({other.state}): {'; '.join(part for part in (other.last, other.failure) if part) or 'said nothing'}"


def _without(lines: Sequence[str], trace: str) -> list[str]:
    """Return the lines that are not those of the traceback, which is shown already."""
    shown = {line.strip() for line in trace.splitlines()}
    return [line for line in lines if line.strip() and line.strip() not in shown]


def _block(title: str, lines: Sequence[str]) -> list[str]:
    return [f"  {title}:", *(f"    {line[:_WIDTH]}" for line in lines)] if lines else []
