"""Events and task states → how a run stands, as a value that prints itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain import wire
from swarmtrain.launchers.base import TaskState
from swarmtrain.wire import Event


@dataclass(frozen=True)
class Status:
    """How a run stands. `state`: starting, training, done, failed or stopped."""

    run: str
    state: str
    why: str = ""
    hint: str = ""
    exit_code: int | None = None
    world: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    failures: int = 0
    tasks: tuple[TaskState, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what a script needs, for --json."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"run {self.run}: {self.state}{f', {self.why}' if self.why else ''}"]
        if self.hint:
            lines.append(f"  hint        {self.hint}")
        if self.world:
            lines.append(f"  world       {counted(self.world.get('world_size'), 'rank')} on {counted(self.world.get('nodes'), 'node')}")
        if self.progress:
            lines.append(f"  step        {progress_line(self.progress)}")
        if self.evaluation:
            lines.append(f"  held out    loss {self.evaluation.get('loss', float('nan')):.4f} at step {self.evaluation.get('step')}")
        if self.checkpoint:
            lines.append(f"  checkpoint  step {self.checkpoint.get('step')} in {self.checkpoint.get('path')}")
        if self.failures:
            lines.append(f"  failures    {self.failures} so far")
        rows = [("NODE", "HOST", "STATE", ""), *((task.node, task.host, task.state, _more(task)) for task in self.tasks)]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines += [
            "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]).rstrip() for row in rows
        ]
        return "\n".join(lines)


def status(run: str, events: Sequence[Event], tasks: Sequence[TaskState]) -> Status:
    """Return how `run` stands, from the board's events (oldest first) and its services' states."""
    last = {event.kind: event.data for event in events}
    verdict = last.get(wire.VERDICT)
    return Status(
        run=run,
        state=_state(verdict, last, tasks),
        why=str(verdict.get("why", "")) if verdict else "",
        hint=str(verdict.get("hint", "")) if verdict else "",
        exit_code=verdict.get("exit_code") if verdict else None,
        world=last.get(wire.WORLD, {}),
        progress=last.get(wire.PROGRESS, {}),
        evaluation=last.get(wire.EVALUATION, {}),
        checkpoint=last.get(wire.CHECKPOINT, {}),
        failures=sum(event.kind == wire.FAILURE for event in events),
        tasks=tuple(tasks),
    )


def progress_line(data: dict[str, Any]) -> str:
    """Return a progress event's data as a line: step, loss, speed and time left."""
    parts = [f"{data.get('step')}/{data.get('steps')}"]
    if (loss := data.get("loss")) is not None:
        parts.append(f"loss {loss:.4f}")
    if (speed := data.get("tokens_per_second")) is not None:
        parts.append(f"{speed:,.0f} tokens/s")
    if (left := data.get("eta_seconds")) is not None:
        parts.append(f"{duration(left)} left")
    return ", ".join(parts)


def counted(number: Any, noun: str) -> str:
    """Return `3 nodes`, or `1 node`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a number of seconds as people write it: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _more(task: TaskState) -> str:
    holds = f"has {', '.join(task.gpus)}" if task.gpus else ""
    return "; ".join(filter(None, (task.reason, holds)))


def _state(verdict: dict[str, Any] | None, last: dict[str, Any], tasks: Sequence[TaskState]) -> str:
    if verdict:
        return str(verdict["status"])
    nodes = [task for task in tasks if task.node != wire.RENDEZVOUS]
    if nodes and all(task.state in ("stopped", "shutdown") for task in nodes):
        return "stopped"
    return "training" if wire.PROGRESS in last else "starting"
