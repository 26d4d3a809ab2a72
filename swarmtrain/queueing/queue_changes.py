"""Changes that users make to the queue: its policy, the order of waiting runs, and the cancellation of one."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import yaml

from swarmtrain.config.loader import parse_section
from swarmtrain.config.schema.queue_policy import QueuePolicy
from swarmtrain.errors import StackError
from swarmtrain.launchers.base import ProgressReporter
from swarmtrain.launchers.common.docker_engine import DockerEngine
from swarmtrain.launchers.swarm.cluster_channels import find_secret_ids
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.launchers.swarm.queue import policy_store
from swarmtrain.launchers.swarm.queue.queue_entry import QueueEntry, update_entry
from swarmtrain.launchers.swarm.run_lock import RunLock
from swarmtrain.queue_labels import EntryState
from swarmtrain.queueing.decisions.queue_model import QueuedRun
from swarmtrain.queueing.queue_state import QueueState


def load_policy_text(engine: DockerEngine) -> str:
    """Return the YAML text of the queue's policy, of the default one if none is stored. Raises EngineError."""
    return policy_store.read_policy_text(engine) or _format_policy(policy_store.DEFAULT_POLICY)


def _format_policy(policy: QueuePolicy) -> str:
    return str(yaml.safe_dump(json.loads(policy.model_dump_json()), sort_keys=False))


def store_policy(engine: DockerEngine, state: QueueState, text: str, *, source: str) -> QueuePolicy:
    """Store the policy in the YAML text `text` instead of the earlier one, and return it.

    Raises ConfigError, EngineError; StackError if it lacks the class of a run in the queue, or if the swarm lacks the secret of a channel.
    """
    policy = parse_section(text, QueuePolicy, source=source)
    find_secret_ids(engine, policy)
    for member in state.members.values():
        priority = member.config.runner.priority if member.config and not member.has_ended else None
        if priority and priority not in policy.classes:
            hint = f"add the class {priority}, or deploy {member.run} with another runner.priority first"
            raise StackError(f"lacks the class {priority}, which {member.run} has", place=source, hint=hint)
    return policy_store.store_policy(engine, text, source=source)


def move_run(engine: DockerEngine, state: QueueState, run: str, place: int, report_progress: ProgressReporter) -> None:
    """Move the waiting `run` to `place` among the waiting runs of its priority, 1 for the first.

    Raises StackError if the run does not wait, or does not wait any more, EngineError.
    """
    waiting = list_waiting_runs(state)
    own = next((queued for queued in waiting if queued.run == run), None)
    if own is None:
        raise _build_not_waiting_error(run, state.members[run].entry if run in state.members else None)
    others = [queued for queued in waiting if queued.priority == own.priority and queued.run != run]
    index = max(0, min(place - 1, len(others)))
    before = others[index - 1].position if index else None
    after = others[index].position if index < len(others) else None
    position = _choose_position(before, after, own.position)

    def change_position(entry: QueueEntry, _coordinator: Service) -> QueueEntry:
        if entry.state is not EntryState.waiting:  # the scheduler has started it since `state` was read
            raise _build_not_waiting_error(run, entry)
        return replace(entry, position=position)

    with RunLock(engine, run, "moves it").hold_lock(report_progress):  # a deploy writes the position that it has read
        if update_entry(engine, run, change_position) is None:
            raise _build_not_waiting_error(run, None)


def withdraw_run(engine: DockerEngine, run: str) -> None:
    """Let the scheduler no longer start `run`, before it is removed. Raises StackError if it has been started meanwhile, EngineError."""

    def withdraw(entry: QueueEntry, _coordinator: Service) -> QueueEntry:
        if entry.state is EntryState.admitted:
            raise StackError("was started meanwhile", place=f"run {run}", hint=f"swarmtrain stop {run}, or swarmtrain down {run}")
        return entry.change_state(EntryState.stopped, time.time(), reason="cancelled")

    update_entry(engine, run, withdraw)


def list_waiting_runs(state: QueueState) -> list[QueuedRun]:
    """Return the waiting runs in the order in which they are served."""
    return sorted((run for run in state.snapshot.runs if run.state is EntryState.waiting), key=lambda run: run.sort_key)


def _build_not_waiting_error(run: str, entry: QueueEntry | None) -> StackError:
    reason = f"does not wait: it is {entry.state}" if entry else "is not in the queue"
    return StackError(reason, place=f"run {run}", hint="swarmtrain queue status")


def _choose_position(before: float | None, after: float | None, unchanged: float) -> float:
    """Return a position between the two; outside of them if there is only one; `unchanged` if there is none."""
    if before is None:
        return unchanged if after is None else after - 1.0
    return before + 0.5 if after is None else (before + after) / 2
