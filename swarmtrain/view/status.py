"""Status of a run, computed from its events and task states. RunStatus formats itself as text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from swarmtrain import protocol
from swarmtrain.launchers.base import QUEUED_STATE, TaskState
from swarmtrain.launchers.task_words import describe_task_reason, format_task_state
from swarmtrain.protocol import Event
from swarmtrain.protocol.run_identity import RunIdentity
from swarmtrain.view.formatting import (
    format_age,
    format_count,
    format_duration,
    format_end_time,
    format_loss,
    format_memory_usage,
    format_table,
)
from swarmtrain.view.worlds import (
    NodeGpuFault,
    NodeRestarts,
    QuarantinedNode,
    WorldInfo,
    count_restarts,
    find_connecting_ranks,
    find_gpu_faults,
    find_quarantined_nodes,
    list_worlds,
)

_STALE_SECONDS = 120.0
"""Age in seconds after which a node's resource usage is outdated."""
_MAX_GPU_FAULTS = 5


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at `time`. `state` is queued, starting, training, done, failed or stopped.

    Fields that come from an event include its `time`; times are seconds since the epoch, memory is in bytes.
    """

    run: str
    state: str
    time: float
    started: float | None = None
    """Time at which the run's coordinator first started."""
    ended: float | None = None
    """Time of the run's outcome."""
    reason: str = ""
    hint: str = ""
    exit_code: int | None = None
    world: dict[str, Any] = field(default_factory=dict)
    worlds: tuple[WorldInfo, ...] = ()
    progress: dict[str, Any] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    straggler: dict[str, Any] = field(default_factory=dict)
    """Data of the straggler, the rank for which the other ranks of this world wait; empty if there is no straggler."""
    failures: int = 0
    restarts: dict[str, NodeRestarts] = field(default_factory=dict)
    """Rank restarts that each node caused, by node name."""
    quarantined: dict[str, QuarantinedNode] = field(default_factory=dict)
    """Nodes that are quarantined because they failed repeatedly, by node name."""
    gpu_faults: tuple[NodeGpuFault, ...] = ()
    """Faults of GPUs that the nodes have reported."""
    usage: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Resource usage by node name, with the keys of UsageMeter.read_usage; empty if outdated, or if the run has its outcome."""
    tasks: tuple[TaskState, ...] = ()
    identity: RunIdentity | None = None

    @property
    def seconds(self) -> float | None:
        """Seconds from the start of the run until its outcome, or until now."""
        return None if self.started is None else (self.ended or self.time) - self.started

    def to_dict(self) -> dict[str, Any]:
        """Return the status as a JSON-compatible dict, for `--json`."""
        return {**asdict(self), "seconds": self.seconds}

    def __str__(self) -> str:
        labeled_lines = [
            ("hint", self.hint),
            ("owner", self.identity.owner_text if self.identity else ""),
            ("world", self._format_world()),
            ("step", format_progress(self.progress) if self.progress else ""),
        ]
        labeled_lines += [
            ("validation", self._format_validation_loss()),
            ("checkpoint", self._format_checkpoint()),
            ("assignment", self._format_assignment()),
            ("slowest", self._format_straggler()),
            ("failures", f"{self.failures} so far" * (self.failures > 0)),
            *(("GPU", f"{fault}, {format_age(self.time, fault.time)}") for fault in self.gpu_faults[-_MAX_GPU_FAULTS:]),
            *(
                ("quarantined", f"{task.node}: {suggest_quarantine_remedy(self.run, task.host)}")
                for task in self.tasks
                if task.node in self.quarantined
            ),
        ]
        lines = [self._format_title(), *(f"  {name:12}{text}" for name, text in labeled_lines if text)]
        return "\n".join([*lines, textwrap.indent(format_table(self._build_node_rows()), "  ")])

    def _format_title(self) -> str:
        running_time = (
            f" for {format_duration(self.seconds)}" if self.seconds is not None and self.state in ("starting", "training") else ""
        )
        total_time = f" after {format_duration(self.seconds)}" if self.seconds is not None and self.ended else ""
        return f"run {self.run}: {self.state}{running_time}{total_time}{f', {self.reason}' if self.reason else ''}"

    def _format_world(self) -> str:
        if not self.world:
            return ""
        line = f"{format_count(self.world.get('world_size'), 'rank')} on {format_count(self.world.get('nodes'), 'node')}"
        if len(self.worlds) < 2:
            return line
        newest = self.worlds[-1]
        return (
            f"{line}, world {newest.number} since {format_duration(self.time - newest.time)}{f': {newest.reason}' if newest.reason else ''}"
        )

    def _format_validation_loss(self) -> str:
        evaluation = self.validation
        return f"loss {format_loss(evaluation.get('loss'))} at step {evaluation.get('step')}" if evaluation else ""

    def _format_checkpoint(self) -> str:
        checkpoint = self.checkpoint
        return (
            f"step {checkpoint.get('step')} in {checkpoint.get('path')}, {format_age(self.time, checkpoint['time'])}" if checkpoint else ""
        )

    def _format_assignment(self) -> str:
        counts = self.progress.get("micro_batches")
        return f"{protocol.format_micro_batch_counts(counts)} micro batches per step, by speed" if counts else ""

    def _format_straggler(self) -> str:
        straggler = self.straggler
        host = next((task.host for task in self.tasks if task.node == straggler.get("node")), "")
        return (
            f"{straggler['message']}{f' ({host})' if host else ''}, since {format_duration(self.time - straggler['time'])}"
            if straggler
            else ""
        )

    def _build_node_rows(self) -> list[list[str]]:
        """Return the rows of the node table. Columns that are empty except for their header are dropped."""
        rows = [["NODE", "HOST", "STATE", "CPU", "MEMORY", "GPU", "GPU MEMORY", "RESTARTS", ""]]
        for task in self.tasks:
            usage, restarts = self.usage.get(task.node, {}) if task.state == "running" else {}, self.restarts.get(task.node)
            quarantine = self.quarantined.get(task.node)
            remark = (
                describe_task_reason(task)
                or (f"quarantined until {format_end_time(quarantine.until, self.time)}: {quarantine.reason}" if quarantine else "")
                or (f"{restarts.reason}, {format_age(self.time, restarts.time)}" if restarts else "")
            )
            remark = "; ".join(filter(None, (remark, f"has {', '.join(task.gpus)}" if task.gpus else "")))
            rows.append([task.node, task.host, task.state, *_format_resource_usage(usage), str(restarts.count) if restarts else "", remark])
        empty = {column for column in range(3, 8) if not any(row[column] for row in rows[1:])}
        return [[cell for column, cell in enumerate(row) if column not in empty] for row in rows]


def build_status(
    run: str, events: Sequence[Event], tasks: Sequence[TaskState], now: float, identity: RunIdentity | None = None
) -> RunStatus:
    """Return the status of `run` at `now`, from the coordinator's events (oldest first) and the states of its tasks."""
    latest = _collect_latest_events(events)
    outcome = latest.get(protocol.EVENT_OUTCOME)
    state = _derive_run_state(outcome, latest, tasks)
    usage, straggler = latest.get(protocol.EVENT_USAGE, {}), latest.get(protocol.EVENT_STRAGGLER, {})
    connecting = find_connecting_ranks(events)
    start_reason = str(connecting or _explain_start(latest, events, tasks))
    is_usage_fresh = now - usage.get("time", 0.0) < _STALE_SECONDS and not outcome
    return RunStatus(
        run=run,
        state="starting" if connecting and state == "training" else state,
        time=now,
        started=next((event.time for event in events if event.kind == protocol.EVENT_COORDINATOR_STARTED), None),
        ended=outcome["time"] if outcome else None,
        reason=str(outcome.get("reason", "")) if outcome else _find_queue_reason(tasks) or start_reason,
        hint=str(outcome.get("hint", "")) if outcome else "",
        exit_code=outcome.get("exit_code") if outcome else None,
        world=latest.get(protocol.EVENT_WORLD_FORMED, {}),
        worlds=tuple(list_worlds(events)),
        progress=latest.get(protocol.EVENT_PROGRESS, {}),
        validation=latest.get(protocol.EVENT_EVALUATION, {}),
        checkpoint=latest.get(protocol.EVENT_CHECKPOINT, {}),
        straggler=straggler if straggler.get("rank") is not None and not outcome else {},
        failures=sum(event.kind == protocol.EVENT_FAILURE for event in events),
        restarts=count_restarts(events),
        quarantined=find_quarantined_nodes(events),
        gpu_faults=tuple(find_gpu_faults(events)),
        usage=usage.get("nodes", {}) if is_usage_fresh else {},
        tasks=tuple(tasks),
        identity=identity,
    )


def _find_queue_reason(tasks: Sequence[TaskState]) -> str:
    """Return why all nodes wait in the queue, or why the queue has stopped them; empty if one of them runs."""
    nodes = [task for task in tasks if task.node != protocol.RENDEZVOUS_SERVICE]
    return nodes[0].reason if nodes and all(task.state in (QUEUED_STATE, "stopped") for task in nodes) else ""


def _explain_start(latest_events: Mapping[str, Any], events: Iterable[Event], tasks: Sequence[TaskState]) -> str:
    """Return what a run that has not formed a world yet waits for; empty if it has formed one, or has been stopped."""
    if _derive_run_state(None, latest_events, tasks) != "starting" or not tasks:
        return ""
    waiting = [task for task in tasks if task.state not in ("running", "complete")]
    if waiting:
        more = f"; {format_count(len(waiting) - 1, 'other service')} not running yet" if len(waiting) > 1 else ""
        return f"{format_task_state(waiting[0])}{more}"
    if protocol.EVENT_COORDINATOR_STARTED not in latest_events:
        return "the coordinator's process is starting"
    joined = {event.data.get("node") for event in events if event.kind == protocol.EVENT_NODE_JOINED}
    absent = [task.node for task in tasks if task.node not in (protocol.RENDEZVOUS_SERVICE, *joined)]
    if absent:
        return f"the processes of {', '.join(absent)} are starting, which takes longer on a busy machine"
    return "all nodes have joined; their ranks are starting, and then form a world"


def format_progress(data: Mapping[str, Any]) -> str:
    """Return a progress event's data as a line of text: step, loss, speed and time left."""
    segments = [f"{data.get('step')}/{data['steps']}" if "steps" in data else f"{data.get('step')}"]
    if (loss := data.get("loss")) is not None:
        segments.append(f"loss {loss:.4f}")
    if (speed := data.get("tokens_per_second")) is not None:
        segments.append(f"{speed:,.0f} tokens/s")
    if (seconds_left := data.get("eta_seconds")) is not None:
        segments.append(f"{format_duration(seconds_left)} left")
    return ", ".join(segments)


def suggest_quarantine_remedy(run: str, host: str) -> str:
    """Return the suggested remedy for the quarantined node of `run` on `host`, as text."""
    drain_hint = f"`docker node update --availability drain {host}` keeps Swarm from scheduling on its machine; " if host else ""
    return f"{drain_hint}`swarmtrain stop {run}`, then deploy, retries it immediately"


def _collect_latest_events(events: Iterable[Event]) -> dict[str, dict[str, Any]]:
    """Return the newest event of each kind, with its time.

    The outcome is dropped if the coordinator restarts after it. The straggler is dropped when a new world forms.
    """
    latest: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.kind == protocol.EVENT_COORDINATOR_STARTED:
            latest.pop(protocol.EVENT_OUTCOME, None)
        if event.kind == protocol.EVENT_WORLD_FORMED:
            latest.pop(protocol.EVENT_STRAGGLER, None)
        latest[event.kind] = {**event.data, "time": event.time}
    return latest


def _format_resource_usage(usage: Mapping[str, Any]) -> list[str]:
    """Return the table cells CPU, MEMORY, GPU and GPU MEMORY of a node."""
    if not usage:
        return ["", "", "", ""]
    gpus = usage.get("gpus") or []
    utilization = (
        f"{sum(gpu['utilization'] for gpu in gpus) / len(gpus):.0f} %" + (f" of {len(gpus)}" if len(gpus) > 1 else "") if gpus else ""
    )
    memory = format_memory_usage(sum(gpu["memory"] for gpu in gpus), sum(gpu["memory_total"] for gpu in gpus)) if gpus else ""
    return [f"{usage['cpu']:.1f}/{usage['cpus']:g}", format_memory_usage(usage["memory"], usage["memory_limit"]), utilization, memory]


def _derive_run_state(outcome: Mapping[str, Any] | None, latest_events: Mapping[str, Any], tasks: Sequence[TaskState]) -> str:
    nodes = [task for task in tasks if task.node != protocol.RENDEZVOUS_SERVICE]
    if nodes and all(task.state == QUEUED_STATE for task in nodes):
        return QUEUED_STATE  # also a run that had ended before
    if outcome:
        return str(outcome["status"])
    if nodes and all(task.state in ("stopped", "shutdown") for task in nodes):
        return "stopped"
    return (
        "training" if protocol.EVENT_PROGRESS in latest_events or protocol.EVENT_WORLD_FORMED in latest_events else "starting"
    )  # a custom script may report no steps
