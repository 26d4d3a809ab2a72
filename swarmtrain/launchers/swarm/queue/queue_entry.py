"""A run's entry in the queue, as labels of its coordinator's service. Only the scheduler and the commands for the queue change them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarmtrain.errors import EngineError
from swarmtrain.launchers.common.docker_engine import DockerEngine, is_not_found_error, is_outdated_version_error
from swarmtrain.launchers.common.engine_values import (
    describe_malformed_labels,
    is_count,
    is_mapping,
    is_number,
    parse_count,
    parse_number,
    parse_text_mapping,
)
from swarmtrain.launchers.swarm import cluster_state
from swarmtrain.launchers.swarm.cluster_state import Service
from swarmtrain.protocol import LABEL_SLOTS
from swarmtrain.queue_labels import LABEL_QUEUE_CHANGED, LABEL_QUEUE_LOST, LABEL_QUEUE_STOP, EntryState, format_queue_stop

LABEL_STATE = "swarmtrain.queue.state"
_LABEL_POSITION = "swarmtrain.queue.position"
_LABEL_MACHINES = "swarmtrain.queue.machines"
_LABEL_REASON = "swarmtrain.queue.reason"
_LABEL_TRAINED = "swarmtrain.queue.trained"
_LABEL_SAVING = "swarmtrain.queue.saving"
_MAX_REASON_LENGTH = 300
_MAX_UPDATE_ATTEMPTS = 10
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class QueueEntry:
    """Entry of a run in the queue."""

    state: EntryState
    position: float = 0.0
    """Order within a priority; 0 until the submission is complete."""
    machines: Mapping[str, str] = field(default_factory=dict)
    """Id of the machine of each admitted node, by the node's name."""
    reason: str = ""
    """Why the run waits, or why it was stopped."""
    changed: float = 0.0
    """Time of the last change of the state, in seconds since the epoch, by the clock of the machine that made it."""
    trained_seconds: float = 0.0
    """Seconds for which the run was admitted before this time: what counts against its time limit after a preemption."""

    is_saving: bool = False
    """Whether the scheduler has asked the nodes to save and stop, and has not yet checked what was saved."""
    lost_steps: int = 0
    """Steps that the run had completed after its last checkpoint when its nodes were killed at the end of their grace."""

    stop: str = ""
    """How and why the scheduler has stopped the run, as `format_queue_stop` writes it; empty unless it has."""

    @property
    def shortened_reason(self) -> str:
        """The reason as the labels store it."""
        return self.reason[:_MAX_REASON_LENGTH]

    def to_labels(self) -> dict[str, str]:
        """Return the labels that store the entry."""
        return {
            LABEL_STATE: str(self.state),
            _LABEL_POSITION: repr(self.position),
            _LABEL_MACHINES: json.dumps(dict(sorted(self.machines.items()))),
            _LABEL_REASON: self.shortened_reason,
            LABEL_QUEUE_CHANGED: f"{self.changed:.0f}",
            _LABEL_TRAINED: f"{self.trained_seconds:.0f}",
            _LABEL_SAVING: "yes" if self.is_saving else "",
            LABEL_QUEUE_LOST: f"{self.lost_steps}",
            LABEL_QUEUE_STOP: self.stop[:_MAX_REASON_LENGTH],
        }

    def stop_run(self, state: EntryState, now: float, reason: str) -> QueueEntry:
        """Return the entry of a run that the scheduler stops at `now`: it waits from then on, or stays stopped."""
        stop = format_queue_stop(reason, resumes=state is EntryState.waiting)
        return replace(self.change_state(state, now, reason=reason), stop=stop)

    def change_state(self, state: EntryState, now: float, *, reason: str = "", machines: Mapping[str, str] | None = None) -> QueueEntry:
        """Return the entry in `state` from `now` on. Time in the state `admitted` is added to `trained_seconds`."""
        trained, is_saving = self.trained_seconds, self.is_saving
        if self.state is EntryState.admitted and state is not EntryState.admitted:
            trained += max(0.0, now - self.changed)
            is_saving = True
        return replace(
            self,
            state=state,
            machines=machines or {},
            reason=reason,
            changed=self.changed if state is self.state else now,
            trained_seconds=trained,
            is_saving=is_saving and state is not EntryState.admitted,
            stop="",
        )


_LABEL_CHECKS = {
    LABEL_STATE: lambda text: text in frozenset(EntryState),
    LABEL_SLOTS: is_count,
    _LABEL_MACHINES: is_mapping,
    **dict.fromkeys((_LABEL_POSITION, LABEL_QUEUE_CHANGED, _LABEL_TRAINED, LABEL_QUEUE_LOST), is_number),
}
"""Checks of the labels of a run's services that the scheduler and the commands parse."""


def parse_entry(labels: Mapping[str, str]) -> QueueEntry | None:
    """Return the entry that `labels` store; None if the run is not in the queue. Malformed values count as absent."""
    try:
        state = EntryState(labels.get(LABEL_STATE, ""))
    except ValueError:
        return None
    return QueueEntry(
        state,
        parse_number(labels.get(_LABEL_POSITION)),
        parse_text_mapping(labels.get(_LABEL_MACHINES)),
        labels.get(_LABEL_REASON, ""),
        parse_number(labels.get(LABEL_QUEUE_CHANGED)),
        parse_number(labels.get(_LABEL_TRAINED)),
        labels.get(_LABEL_SAVING) == "yes",
        parse_count(labels.get(LABEL_QUEUE_LOST)),
        labels.get(LABEL_QUEUE_STOP, ""),
    )


def describe_malformed_run(services: Sequence[Service]) -> str:
    """Return which labels of a run, whose services these are, are malformed, and ignored; empty if none is."""
    descriptions = (describe_malformed_labels(service.labels, _LABEL_CHECKS) for service in services)
    return "; ".join(dict.fromkeys(filter(None, descriptions)))


def find_queue_entry(services: Sequence[Service], run: str) -> QueueEntry | None:
    """Return the entry of `run`, whose services these are; None if it is not in the queue."""
    coordinator = cluster_state.find_coordinator(list(services), run)
    return parse_entry(coordinator.labels) if coordinator else None


def update_entry(engine: DockerEngine, run: str, change: Callable[[QueueEntry, Service], QueueEntry]) -> QueueEntry | None:
    """Change the entry of `run` as the coordinator's service stores it now, and return the new one; None if the run is not in the queue.

    `change` is called with the entry and the service, and again if the scheduler or another command changes them meanwhile. The
    coordinator's container is not restarted. Raises EngineError, and what `change` raises.
    """
    for is_last_attempt in [False] * (_MAX_UPDATE_ATTEMPTS - 1) + [True]:
        coordinator = cluster_state.find_coordinator(cluster_state.list_services(engine, run), run)
        entry = parse_entry(coordinator.labels) if coordinator else None
        if coordinator is None or entry is None:
            return None
        new_entry = change(entry, coordinator)
        if new_entry == entry:
            return entry
        spec = {**coordinator.spec, "Labels": {**coordinator.labels, **new_entry.to_labels()}}
        try:
            engine.post(f"/services/{coordinator.id}/update", spec, {"version": str(coordinator.version), "registryAuthFrom": "spec"})
        except EngineError as error:
            if is_last_attempt or not (is_outdated_version_error(error) or is_not_found_error(error)):
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return new_entry
    raise AssertionError("the last attempt returns or raises")


def is_waiting_in_queue(services: Sequence[Service], run: str) -> bool:
    """Return whether `run` waits in the queue, so that it has no nodes but has not ended."""
    entry = find_queue_entry(services, run)
    return entry is not None and entry.state in (EntryState.waiting, EntryState.incomplete)
