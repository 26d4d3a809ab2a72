"""Events and task states → how a run stands, as a value that prints itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain import wire
from swarmtrain.launchers.base import TaskState
from swarmtrain.view.times import ago, clock, counted, duration, gibibytes
from swarmtrain.view.worlds import LeftOut, Restart, World, left_out, restarts, worlds
from swarmtrain.wire import Event

_STALE = 120.0
"""Seconds after which what a node used is of no more interest."""


@dataclass(frozen=True)
class Status:
    """How a run stands at `time`. `state`: starting, training, done, failed or stopped.

    What comes from an event has its `time` in it; times are seconds since the epoch, memory is in bytes.
    """

    run: str
    state: str
    time: float
    started: float | None = None
    """When its notice board was first up."""
    ended: float | None = None
    """When it got its verdict."""
    why: str = ""
    hint: str = ""
    exit_code: int | None = None
    world: dict[str, Any] = field(default_factory=dict)
    worlds: tuple[World, ...] = ()
    progress: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    straggler: dict[str, Any] = field(default_factory=dict)
    """The rank that the others of this world wait for; empty if there is none."""
    failures: int = 0
    restarts: dict[str, Restart] = field(default_factory=dict)
    """By node."""
    left_out: dict[str, LeftOut] = field(default_factory=dict)
    """By node: those that sit out, since they failed again and again."""
    usage: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By node: cpu of cpus, memory of memory_limit, gpus."""
    tasks: tuple[TaskState, ...] = ()

    @property
    def seconds(self) -> float | None:
        """How long it has run, or ran."""
        return None if self.started is None else (self.ended or self.time) - self.started

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs, for --json."""
        return {**asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        facts = [("hint", self.hint), ("world", self._world()), ("step", progress_line(self.progress) if self.progress else "")]
        facts += [
            ("held out", self._held_out()),
            ("checkpoint", self._checkpoint()),
            ("slowest", self._slowest()),
            ("failures", f"{self.failures} so far" * (self.failures > 0)),
            *(("left out", f"{task.node}: {remedy(self.run, task.host)}") for task in self.tasks if task.node in self.left_out),
        ]
        lines = [self._title(), *(f"  {name:12}{text}" for name, text in facts if text)]
        return "\n".join([*lines, *_table(self._rows())])

    def _title(self) -> str:
        since = f" for {duration(self.seconds)}" if self.seconds is not None and self.state in ("starting", "training") else ""
        took = f" after {duration(self.seconds)}" if self.seconds is not None and self.ended else ""
        return f"run {self.run}: {self.state}{since}{took}{f', {self.why}' if self.why else ''}"

    def _world(self) -> str:
        if not self.world:
            return ""
        line = f"{counted(self.world.get('world_size'), 'rank')} on {counted(self.world.get('nodes'), 'node')}"
        if len(self.worlds) < 2:
            return line
        newest = self.worlds[-1]
        return f"{line}, world {newest.number} since {duration(self.time - newest.time)}{f': {newest.why}' if newest.why else ''}"

    def _held_out(self) -> str:
        found = self.evaluation
        return f"loss {found.get('loss', float('nan')):.4f} at step {found.get('step')}" if found else ""

    def _checkpoint(self) -> str:
        found = self.checkpoint
        return f"step {found.get('step')} in {found.get('path')}, {ago(self.time, found['time'])}" if found else ""

    def _slowest(self) -> str:
        found = self.straggler
        host = next((task.host for task in self.tasks if task.node == found.get("node")), "")
        return f"{found['message']}{f' ({host})' if host else ''}, since {duration(self.time - found['time'])}" if found else ""

    def _rows(self) -> list[list[str]]:
        """Return the table of nodes; a column that is empty but for its head is left out."""
        rows = [["NODE", "HOST", "STATE", "CPU", "MEMORY", "GPU", "GPU MEMORY", "RESTARTS", ""]]
        for task in self.tasks:
            used, again = self.usage.get(task.node, {}) if task.state == "running" else {}, self.restarts.get(task.node)
            out = self.left_out.get(task.node)
            why = (
                task.reason
                or (f"left out until {clock(out.until)[11:16]}: {out.why}" if out else "")
                or (f"{again.why}, {ago(self.time, again.time)}" if again else "")
            )
            why = "; ".join(filter(None, (why, f"has {', '.join(task.gpus)}" if task.gpus else "")))
            rows.append([task.node, task.host, task.state, *_used(used), str(again.count) if again else "", why])
        empty = {column for column in range(3, 8) if not any(row[column] for row in rows[1:])}
        return [[cell for column, cell in enumerate(row) if column not in empty] for row in rows]


def status(run: str, events: Sequence[Event], tasks: Sequence[TaskState], now: float) -> Status:
    """Return how `run` stands at `now`, from the board's events (oldest first) and its services' states."""
    last = _last(events)
    verdict = last.get(wire.VERDICT)
    usage, straggler = last.get(wire.USAGE, {}), last.get(wire.STRAGGLER, {})
    fresh = now - usage.get("time", 0.0) < _STALE and not verdict
    return Status(
        run=run,
        state=_state(verdict, last, tasks),
        time=now,
        started=next((event.time for event in events if event.kind == wire.BOARD_UP), None),
        ended=verdict["time"] if verdict else None,
        why=str(verdict.get("why", "")) if verdict else "",
        hint=str(verdict.get("hint", "")) if verdict else "",
        exit_code=verdict.get("exit_code") if verdict else None,
        world=last.get(wire.WORLD, {}),
        worlds=tuple(worlds(events)),
        progress=last.get(wire.PROGRESS, {}),
        evaluation=last.get(wire.EVALUATION, {}),
        checkpoint=last.get(wire.CHECKPOINT, {}),
        straggler=straggler if straggler.get("rank") is not None and not verdict else {},
        failures=sum(event.kind == wire.FAILURE for event in events),
        restarts=restarts(events),
        left_out=left_out(events),
        usage=usage.get("nodes", {}) if fresh else {},
        tasks=tuple(tasks),
    )


def progress_line(data: Mapping[str, Any]) -> str:
    """Return a progress event's data as a line: step, loss, speed and time left."""
    parts = [f"{data.get('step')}/{data['steps']}" if "steps" in data else f"{data.get('step')}"]
    if (loss := data.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (speed := data.get("tokens_per_second")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if (left := data.get("eta_seconds")) is not None:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def remedy(run: str, host: str) -> str:
    """Return what can be done about a node that is left out."""
    drain = f"`docker node update --availability drain {host}` keeps a swarm off its machine; " if host else ""
    return f"{drain}`swarmtrain stop {run}`, then deploy, gives it a chance at once"


def _last(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """Return the newest event of each kind, with its time; a board that was started after a verdict has none.

    Which rank others wait for is a matter of one world.
    """
    last: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.kind == wire.BOARD_UP:
            last.pop(wire.VERDICT, None)
        if event.kind == wire.WORLD:
            last.pop(wire.STRAGGLER, None)
        last[event.kind] = {**event.data, "time": event.time}
    return last


def _used(used: Mapping[str, Any]) -> list[str]:
    """Return the cells CPU, MEMORY, GPU and GPU MEMORY of a node."""
    if not used:
        return ["", "", "", ""]
    gpus = used.get("gpus") or []
    busy = f"{sum(gpu['use'] for gpu in gpus) / len(gpus):.0f} %" + (f" of {len(gpus)}" if len(gpus) > 1 else "") if gpus else ""
    memory = gibibytes(sum(gpu["memory"] for gpu in gpus), sum(gpu["memory_total"] for gpu in gpus)) if gpus else ""
    return [f"{used['cpu']:.1f}/{used['cpus']:g}", gibibytes(used["memory"], used["memory_limit"]), busy, memory]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    cells = [[*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]] for row in rows]
    return ["  " + "  ".join(row).rstrip() for row in cells]


def _state(verdict: Mapping[str, Any] | None, last: Mapping[str, Any], tasks: Sequence[TaskState]) -> str:
    if verdict:
        return str(verdict["status"])
    nodes = [task for task in tasks if task.node != wire.RENDEZVOUS]
    if nodes and all(task.state in ("stopped", "shutdown") for task in nodes):
        return "stopped"
    return "training" if wire.PROGRESS in last or wire.WORLD in last else "starting"  # a script of one's own may tell no steps
