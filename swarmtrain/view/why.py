"""Diagnosis of a failed run, computed from events, task states and output: the first rank to fail, the cause, the other ranks, the fix."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from swarmtrain import protocol
from swarmtrain.failure_text import describe_error, format_failure
from swarmtrain.launchers.base import LogLine, TaskState
from swarmtrain.launchers.task_words import describe_task_reason
from swarmtrain.protocol import Event
from swarmtrain.view.formatting import format_duration, format_end_time, format_time
from swarmtrain.view.known_failures import FailureEvidence, FailureSignature, get_signal_name, identify_failure
from swarmtrain.view.root_cause import CausePriority, list_interruptions
from swarmtrain.view.status import format_progress, suggest_quarantine_remedy
from swarmtrain.view.worlds import find_connecting_ranks, find_gpu_faults, find_quarantined_nodes, list_worlds

LINES_BEFORE_SECONDS = 60.0
"""Seconds before a failure whose output may explain the failure."""
_LINES_AFTER_SECONDS = 2.0
_MAX_LINES = 8
_MAX_TRACEBACK_LINES = 16
_MAX_LINE_WIDTH = 160
_MAX_GPU_FAULTS = 5
_CONNECTING_TEXT = "its ranks wait for their process group"
_CONNECTING_HINT = (
    "a script that works for long before init_process_group may need this time; otherwise `swarmtrain doctor CONFIG` checks whether the "
    "nodes reach each other"
)


@dataclass(frozen=True)
class PeerNode:
    """Another node at the time of the first failure: its last output line before the failure, and its own failure, if any."""

    node: str
    state: str
    failure: str
    last: str


@dataclass(frozen=True)
class FailureDiagnosis:
    """Diagnosis of why a run failed, or last restarted its ranks. `time` is in seconds since the epoch."""

    run: str
    outcome: str
    """Outcome that the coordinator reported, or that the ranks wait for their process group; empty if the run continues."""
    node: str
    rank: int | None
    host: str
    time: float
    world: int
    progress: str
    error: str
    detail: str
    """Text of the exception, if `error` describes it in other words; otherwise empty."""
    exit_status: str
    signature: str
    meaning: str
    fix: str
    gpu_faults: tuple[str, ...]
    """Faults of GPUs that the nodes have reported, oldest first."""
    quarantine: str
    """Text with the end of the failed node's quarantine and the suggested remedy; empty if the node is not quarantined."""
    traceback: str
    lines: tuple[str, ...]
    peers: tuple[PeerNode, ...]

    @property
    def rank_label(self) -> str:
        return f"{self.node} rank {self.rank}" if self.rank is not None else self.node

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as a JSON-compatible dict, for `--json`."""
        return asdict(self)

    def __str__(self) -> str:
        location = (
            f"{self.rank_label}{f' on {self.host}' if self.host else ''}, "
            f"at {format_time(self.time)}{f', in world {self.world}' if self.world else ''}"
        )
        labeled_lines = [
            ("first", location),
            ("step", self.progress),
            ("error", self.error),
            ("detail", self.detail),
            ("exit", self.exit_status),
            ("means", self.meaning),
            ("fix", self.fix),
            *(("GPU", fault) for fault in self.gpu_faults),
            ("now", self.quarantine),
        ]
        lines = [
            protocol.format_run_summary(self.run, self.outcome or "resumed after a failure"),
            *(f"  {name:8}{text}" for name, text in labeled_lines if text),
        ]
        lines += _format_block("traceback", self.traceback.splitlines()[-_MAX_TRACEBACK_LINES:])
        lines += _format_block(f"last lines of {self.rank_label}", self.lines)
        lines += _format_block("meanwhile", [_format_peer_node(other) for other in self.peers])
        return "\n".join(lines)


def find_root_cause(events: Sequence[Event], tasks: Sequence[TaskState] = ()) -> Event | None:
    """Return a failure event of what made the ranks restart last, or ended the run; None if nothing has failed.

    A restart of the coordinator interrupts no rank, so any other cause takes precedence over it.
    """
    exits = [task_exit for task in tasks for task_exit in task.exits]
    causes = [cause for each in reversed(list_interruptions(events, exits)) if (cause := each.root_cause) and cause.failure]
    cause = next((cause for cause in causes if cause.priority is not CausePriority.coordinator), causes[0] if causes else None)
    return Event(protocol.EVENT_FAILURE, dict(cause.failure), cause.time) if cause else None


def diagnose_failure(
    run: str, events: Sequence[Event], tasks: Sequence[TaskState], log_lines: Iterable[LogLine]
) -> FailureDiagnosis | None:
    """Return the diagnosis of `run`; None if nothing has failed. `events` and `log_lines` are in chronological order."""
    connecting = _find_connecting_failure(events)
    first = (
        connecting
        or find_root_cause(events, tasks)
        or _find_outcome_failure(events)
        or _find_container_start_failure(tasks, events)
        or _find_gpu_failure(events)
    )
    if first is None:
        return None
    data = first.data
    node, rank = str(data.get("node", "")), data.get("rank")
    # Lines that another program wrote into a log file have no timestamp, so they may belong to the failure.
    recent_lines = [
        line for line in log_lines if not line.time or first.time - LINES_BEFORE_SECONDS < line.time < first.time + _LINES_AFTER_SECONDS
    ]
    own_lines = [line.text for line in recent_lines if line.node == node and rank in (None, line.rank)]
    host = next((task.host for task in tasks if task.node == node), "")
    quarantine = find_quarantined_nodes(events).get(node)
    reasons = [task.reason for task in tasks if task.node == node and task.reason]
    signature = identify_failure(FailureEvidence(data, "\n".join([*own_lines[-_MAX_LINES:], *reasons])))
    raw_error = " ".join(str(data.get("error") or "").split())
    error = describe_error(data)
    earlier_events = [event for event in events if event.time <= first.time]
    progress = next((event.data for event in reversed(earlier_events) if event.kind == protocol.EVENT_PROGRESS), None)
    outcome = next(
        (event.data for event in reversed(events) if event.kind in (protocol.EVENT_OUTCOME, protocol.EVENT_COORDINATOR_STARTED)), {}
    )
    return FailureDiagnosis(
        run=run,
        outcome=protocol.describe_outcome(outcome) if "status" in outcome else _CONNECTING_TEXT if connecting else "",
        node=node,
        rank=rank,
        host=host,
        time=first.time,
        world=len(list_worlds(earlier_events)),
        progress=format_progress(progress) if progress else "",
        error=error,
        detail=raw_error if raw_error != error else "",
        exit_status=_format_exit_status(data),
        signature=signature.name if signature else "",
        meaning=signature.meaning if signature else "",
        fix=_choose_fix(data, signature),
        gpu_faults=tuple(map(str, find_gpu_faults(events)[-_MAX_GPU_FAULTS:])),
        quarantine=f"{node} is quarantined until {format_end_time(quarantine.until, first.time)}. {suggest_quarantine_remedy(run, host)}"
        if quarantine
        else "",
        traceback=str(data.get("traceback", "")),
        lines=tuple(_drop_traceback_lines(own_lines, str(data.get("traceback", "")))[-_MAX_LINES:]),
        peers=_collect_peer_nodes(node, first, events, tasks, recent_lines),
    )


def _find_connecting_failure(events: Sequence[Event]) -> Event | None:
    """Return a failure event for ranks that wait for their process group; None if none does."""
    connecting = find_connecting_ranks(events)
    if connecting is None:
        return None
    data = {"node": next(iter(connecting.ranks)), "error": str(connecting), "hint": _CONNECTING_HINT}
    return Event(protocol.EVENT_FAILURE, data, connecting.time)


def _choose_fix(failure_data: dict[str, Any], signature: FailureSignature | None) -> str:
    """Return the suggested fix: the hint of the failed process if it reported one, else the fix of the known failure mode."""
    return str(failure_data.get("hint") or (signature.fix if signature else ""))


def _format_exit_status(failure_data: dict[str, Any]) -> str:
    """Return the exit code or signal of the failed process as text; empty if neither was reported."""
    code = failure_data.get("exit_code")
    if name := failure_data.get("signal"):
        number = getattr(signal, str(name), None)
        return f"killed by {name}{f', {128 + number} as a shell exit code' if number else ''}"
    if not isinstance(code, int):
        return ""
    name = get_signal_name(code - 128) if code > 128 else ""
    return f"exit code {code}{f', which is {name}' if name else ''}"


def _find_outcome_failure(events: Sequence[Event]) -> Event | None:
    """Return a failure event with the reason of the coordinator's outcome; None if the run has no outcome yet, or is done."""
    outcome = next((event for event in reversed(events) if event.kind == protocol.EVENT_OUTCOME), None)
    if outcome is None or outcome.data.get("status") == "done":
        return None
    data = {"node": protocol.RENDEZVOUS_SERVICE, "error": outcome.data.get("reason"), "exit_code": outcome.data.get("exit_code")}
    return Event(protocol.EVENT_FAILURE, data, outcome.time)


def _find_container_start_failure(tasks: Sequence[TaskState], events: Sequence[Event]) -> Event | None:
    """Return a failure event for a container that did not start, or ended before its processes reported a reason; None otherwise."""
    failed_tasks = [task for task in tasks if task.reason and task.state not in ("running", "complete", "stopped", "shutdown")]
    if not failed_tasks:
        return None
    data = {"node": failed_tasks[0].node, "error": describe_task_reason(failed_tasks[0]), "exit_code": failed_tasks[0].exit_code}
    return Event(protocol.EVENT_FAILURE, data, events[-1].time if events else 0.0)


def _find_gpu_failure(events: Sequence[Event]) -> Event | None:
    """Return a failure event for the last faulty GPU, because of which a node was excluded before its ranks failed; None if there is none.

    Its node has saved its state, and does not report a failure.
    """
    faults = [fault for fault in find_gpu_faults(events) if fault.is_hardware]
    if not faults:
        return None
    data = {"node": faults[-1].node, "error": faults[-1].message, "hint": faults[-1].hint}
    return Event(protocol.EVENT_FAILURE, data, faults[-1].time)


def _collect_peer_nodes(
    node: str, first_failure: Event, events: Sequence[Event], tasks: Sequence[TaskState], recent_lines: Sequence[LogLine]
) -> tuple[PeerNode, ...]:
    peers = []
    for task in tasks:
        if task.node in (node, protocol.RENDEZVOUS_SERVICE):
            continue
        failure = next(
            (
                event
                for event in events
                if event.kind == protocol.EVENT_FAILURE and event.data.get("node") == task.node and event.time >= first_failure.time
            ),
            None,
        )
        failure_text = f"{format_failure(failure.data)}, {format_duration(failure.time - first_failure.time)} later" if failure else ""
        last_line = next((line for line in reversed(recent_lines) if line.node == task.node and line.time <= first_failure.time), None)
        age_text = f", {format_duration(first_failure.time - last_line.time)} before" if last_line and last_line.time else ""
        state_text = f"{task.state}, {task_reason}" if (task_reason := describe_task_reason(task)) else task.state
        peers.append(PeerNode(task.node, state_text, failure_text, f"{last_line.text}{age_text}" if last_line else ""))
    return tuple(peers)


def _format_peer_node(peer: PeerNode) -> str:
    return f"{peer.node} ({peer.state}): {'; '.join(part for part in (peer.last, peer.failure) if part) or 'no output'}"


def _drop_traceback_lines(lines: Sequence[str], traceback: str) -> list[str]:
    """Return the lines that are not part of the traceback, which is shown separately."""
    traceback_lines = {line.strip() for line in traceback.splitlines()}
    return [line for line in lines if line.strip() and line.strip() not in traceback_lines]


def _format_block(title: str, lines: Sequence[str]) -> list[str]:
    return [f"  {title}:", *(f"    {line[:_MAX_LINE_WIDTH]}" for line in lines)] if lines else []
