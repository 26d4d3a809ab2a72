"""Runs that use too much of what others wait for: they reach their time limit, or leave their GPUs idle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from swarmtrain.config.schema.fields.duration import format_duration_text
from swarmtrain.config.schema.queue_policy import IdleAction, IdlePolicy
from swarmtrain.config.schema.runner import GpuMode, TimeLimitAction
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry
from swarmtrain.protocol import EVENT_USAGE, Event
from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.queue_state import QueueMember

IDLE_REPORT_TEXT = "all its GPUs have been idle for"
# A GPU with a lower utilization, in percent, is idle. A rank that waits for others in a collective shows 100.
_MAX_IDLE_PERCENT = 5
_SAMPLE_SECONDS = 30.0


def find_limit_change(member: QueueMember, now: float) -> QueueEntry | None:
    """Return the new entry of an admitted run whose time limit is near, else None.

    It is asked to stop `runner.stop_grace` before the limit, but not before half of the limit, so that it has saved when the limit is
    reached. A run that is queued again goes to the end of the queue, and has its whole limit again.
    """
    runner = member.config.runner if member.config else None
    if runner is None or runner.time_limit is None or compute_seconds_until_limit(member, now) > 0:
        return None
    limit = format_duration_text(runner.time_limit)
    if runner.on_time_limit is TimeLimitAction.stop:
        return member.entry.stop_run(EntryState.stopped, now, f"reached its time limit of {limit}")
    entry = member.entry.stop_run(EntryState.waiting, now, f"reached its time limit of {limit}, and is queued again")
    return replace(entry, trained_seconds=0.0, position=float(max(service.version for service in member.services)))


def compute_seconds_until_limit(member: QueueMember, now: float) -> float:
    """Return in how many seconds an admitted run is asked to stop for its time limit, 0 at the earliest; infinity without a limit."""
    runner = member.config.runner if member.config else None
    if runner is None or runner.time_limit is None:
        return math.inf
    used = member.entry.trained_seconds + max(0.0, now - member.entry.changed)
    return max(0.0, max(runner.time_limit - runner.stop_grace, runner.time_limit / 2) - used)


class IdleGpuMonitor:
    """Observes the GPUs of the admitted runs, and applies the policy for idle ones.

    The observation starts again with each scheduler: a GPU is idle since this process has first seen it idle.
    """

    def __init__(self, read_events: Callable[[QueueMember], Sequence[Event]]) -> None:
        self._read_events = read_events
        self._idle_since: dict[str, float] = {}
        self._sampled_at: dict[str, float] = {}

    def find_change(self, member: QueueMember, policy: IdlePolicy, now: float) -> QueueEntry | None:
        """Return the new entry of an admitted run whose GPUs are idle for too long, or are in use again; None if nothing changes."""
        runner = member.config.runner if member.config else None
        if runner is None or runner.swarm.gpu in (None, GpuMode.none):
            return None
        if now - self._sampled_at.get(member.run, float("-inf")) >= _SAMPLE_SECONDS:
            self._sampled_at[member.run] = now
            self._update(member, now)
        since = self._idle_since.get(member.run)
        is_reported = member.entry.reason.startswith(IDLE_REPORT_TEXT)
        if since is None or now - since < policy.after:
            return replace(member.entry, reason="") if is_reported and since is None else None
        reason = f"{IDLE_REPORT_TEXT} {format_duration_text(policy.after)}"
        if policy.action is IdleAction.release:
            return member.entry.stop_run(EntryState.stopped, now, f"{reason}: stopped by the policy of the queue")
        return None if is_reported else replace(member.entry, reason=f"{reason} or longer")

    def _update(self, member: QueueMember, now: float) -> None:
        events = [event for event in self._read_events(member) if event.kind == EVENT_USAGE]
        if not events:
            return
        nodes = events[-1].data.get("nodes", {})
        gpus = [gpu for usage in nodes.values() for gpu in usage.get("gpus") or []]
        if gpus and all(gpu["utilization"] < _MAX_IDLE_PERCENT for gpu in gpus):
            self._idle_since.setdefault(member.run, now)
        else:
            self._idle_since.pop(member.run, None)
