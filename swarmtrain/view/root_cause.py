"""Root cause of each interruption of a run: of all that happened between two worlds, what explains why the first of them ended.

The failure of a rank with a reason of its own, and the exit of a container, come before a lost node. Both come before a planned change,
and all of these before collateral failures, whose reason is only that another rank is gone. Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import inf
from typing import Any

from swarmtrain import protocol
from swarmtrain.failure_text import format_failure, is_timeout
from swarmtrain.launchers.base import TaskExit
from swarmtrain.protocol import EXIT_PLANNED, RENDEZVOUS_SERVICE, Event, is_collateral_failure

_EXIT_WITH_ENGINE = 255
"""Exit code that an engine reports for a container that it finds dead after a restart."""
_SIMULTANEOUS_SECONDS = 1.0
"""Seconds within which the order of two reports means nothing."""


class CausePriority(IntEnum):
    """Priority among the possible causes of an interruption; the lowest number takes precedence."""

    failure = 0
    lost_node = 1
    coordinator = 2
    planned = 3
    collateral = 4
    joined = 5


@dataclass(frozen=True)
class RootCause:
    """A possible cause of an interruption of a run, at `time` (seconds since the epoch)."""

    priority: CausePriority
    time: float
    node: str
    text: str
    """The cause in the user's words, with its node."""
    failure: Mapping[str, Any] = field(default_factory=dict)
    """The cause as the data of a failure event; empty if nothing has failed, as after a planned change."""


@dataclass
class Interruption:
    """What happened while a world existed, until the next world formed: the possible causes of its end. `world` is 1-based."""

    world: int
    ranks: Mapping[str, Sequence[int]]
    """Ranks of each node of the world."""
    key: str = ""
    """Key of the world (protocol.WorldAssignment)."""
    causes: list[RootCause] = field(default_factory=list)

    @property
    def members(self) -> set[str]:
        """Nodes of the world."""
        return set(self.ranks)

    @property
    def root_cause(self) -> RootCause | None:
        """The cause that takes precedence, at the time of the first failure that it caused; None if nothing is known."""
        if not self.causes:
            return None
        first = min(self.causes, key=lambda cause: (cause.priority, "SIGTERM" in cause.text, cause.time))
        collateral = [cause for cause in self.causes if cause.priority is CausePriority.collateral]
        if first.priority is CausePriority.collateral:
            joined = next((cause for cause in self.causes if cause.priority is CausePriority.joined), None)
            if joined and joined.time <= first.time:
                return joined
            return self._find_unresponsive_node(collateral) or self._find_accused_node(collateral) or first
        if first.priority is CausePriority.planned and self.has_timeout_before(first.time):
            return self._find_unresponsive_node(collateral) or self._convert_to_unreachable_node(first)
        if first.priority in (CausePriority.failure, CausePriority.lost_node) and collateral:
            return replace(first, time=min(first.time, collateral[0].time))
        return first

    def has_timeout_before(self, time: float) -> bool:
        """Return whether a rank has waited too long for another before `time`: what happened only then is not why it waited."""
        return any(is_timeout(cause.failure) and cause.time <= time for cause in self.causes)

    def _convert_to_unreachable_node(self, planned_exit: RootCause) -> RootCause:
        """Return as the cause that the node of `planned_exit` was lost: an engine ends the container of such a node when it returns."""
        error = "could not be reached: ranks waited too long for each other, and then its engine ended its container"
        failure = {"node": planned_exit.node, "error": error}
        return RootCause(CausePriority.lost_node, planned_exit.time, planned_exit.node, format_failure(failure), failure)

    def _find_unresponsive_node(self, collateral: Sequence[RootCause]) -> RootCause | None:
        """Return as the cause the only node with ranks that did not wait for others, if all other ranks waited too long; else None."""
        waiting = {cause.failure.get("rank") for cause in collateral if is_timeout(cause.failure)}
        suspects = {node: [rank for rank in ranks if rank not in waiting] for node, ranks in self.ranks.items()}
        suspects = {node: ranks for node, ranks in suspects.items() if ranks}
        if len(suspects) != 1 or len(waiting) == 0:
            return None
        ((node, ranks),) = suspects.items()
        error = "did not respond: all other ranks waited for it too long"
        failure = {"node": node, "error": error, **({"rank": ranks[0]} if len(ranks) == 1 else {})}
        return RootCause(CausePriority.collateral, collateral[0].time, node, format_failure(failure), failure)

    def _find_accused_node(self, collateral: Sequence[RootCause]) -> RootCause | None:
        """Return as the cause the node to which more nodes than to any other lost their connections before it failed itself; else None."""
        failed_at: dict[str, float] = {}
        for cause in collateral:
            failed_at.setdefault(cause.node, cause.time)
        accusations = {
            (cause.node, peer)
            for cause in collateral
            if (peer := str(cause.failure.get("peer", ""))) and failed_at.get(peer, inf) > cause.time + _SIMULTANEOUS_SECONDS
        }
        counts = Counter(peer for _, peer in accusations).most_common()
        if not counts or (len(counts) > 1 and counts[0][1] == counts[1][1]):
            return None
        accused = counts[0][0]
        others = " and ".join(sorted(node for node, peer in accusations if peer == accused))
        failure = {"node": accused, "error": f"closed its connections without reporting a reason: {others} lost it"}
        return RootCause(CausePriority.collateral, collateral[0].time, accused, format_failure(failure), failure)


def list_interruptions(events: Sequence[Event], exits: Iterable[TaskExit] = ()) -> list[Interruption]:
    """Return for each world, and for the time before the first world, the possible causes of its end; oldest first.

    `events` are in chronological order. `exits`: exits of the run's tasks that its launcher reports. Those before the first world
    interrupted nothing: a container that starts before the coordinator can be reached exits, and is restarted.
    """
    builder = _InterruptionBuilder()
    first_world_time = next((event.time for event in events if event.kind == protocol.EVENT_WORLD_FORMED), -inf)
    pending_exits = deque(sorted((each for each in exits if each.time > first_world_time), key=lambda task_exit: task_exit.time))
    for event in events:
        while pending_exits and pending_exits[0].time <= event.time:
            builder.add_task_exit(pending_exits.popleft())
        builder.add_event(event)
    for task_exit in pending_exits:
        builder.add_task_exit(task_exit)
    return builder.interruptions


class _InterruptionBuilder:
    def __init__(self) -> None:
        self.interruptions = [Interruption(0, {})]
        self._present: set[str] = set()
        self._gpu_faults: dict[str, dict[str, Any]] = {}
        self._is_active = False
        """Whether a world has formed, and neither has the run ended since, nor have all nodes left."""

    def add_event(self, event: Event) -> None:
        node, data = str(event.data.get("node", "a node")), event.data
        if event.kind == protocol.EVENT_WORLD_FORMED:
            self._add_world(event)
        elif event.kind == protocol.EVENT_OUTCOME:
            self._present.clear()
            self._is_active = False
        elif event.kind == protocol.EVENT_FAILURE:
            priority = CausePriority.collateral if is_collateral_failure(data) else CausePriority.failure
            same_world = [each for each in self.interruptions if each.key and each.key == data.get("world")]
            interruption = same_world[0] if same_world else self.interruptions[-1]
            interruption.causes.append(RootCause(priority, event.time, node, format_failure(data), data))
        elif event.kind == protocol.EVENT_NODE_LEFT:
            self._add_node_exit(event)
        elif event.kind == protocol.EVENT_NODE_JOINED:
            self._add_joined_node(node, event.time)
        elif event.kind == protocol.EVENT_NODE_RELEASED:
            self._add(CausePriority.joined, event.time, node, f"{node} joined")
        elif event.kind == protocol.EVENT_GPU_FAULT and data.get("is_hardware"):
            self._gpu_faults[node] = {"node": node, "error": data["message"], "hint": data["hint"], "time": event.time}
        elif event.kind == protocol.EVENT_NODE_QUARANTINED:
            fault = self._gpu_faults.pop(node, {})
            text = f"{node} was quarantined: {data.get('reason')}"
            self._add(CausePriority.lost_node, fault.pop("time", event.time), node, text, fault)
        elif event.kind == protocol.EVENT_COORDINATOR_STARTED and self._is_active:
            error = "the coordinator was restarted"
            self._add(CausePriority.coordinator, event.time, RENDEZVOUS_SERVICE, error, {"node": RENDEZVOUS_SERVICE, "error": error})

    def add_task_exit(self, task_exit: TaskExit) -> None:
        node, code = task_exit.node, task_exit.exit_code
        error = _describe_task_exit(task_exit)
        failure = {"node": node, "error": error, "exit_code": code}
        if node == RENDEZVOUS_SERVICE:
            self._add(CausePriority.coordinator, task_exit.time, node, "the coordinator was restarted: " + error, failure)
            return
        interruption = self._find_interruption_of(node)
        priority = CausePriority.failure if interruption is self.interruptions[-1] else CausePriority.lost_node
        text = f"{node} failed: {error}"
        interruption.causes.append(RootCause(priority, task_exit.time, node, text, failure))

    def _add(self, priority: CausePriority, time: float, node: str, text: str, failure: Mapping[str, Any] | None = None) -> None:
        self.interruptions[-1].causes.append(RootCause(priority, time, node, text, failure or {}))

    def _add_world(self, event: Event) -> None:
        ranks = event.data.get("ranks") or {}
        members = set(ranks)
        previous = self.interruptions[-1]
        if members:
            # A node may also be missing because torch formed a world before it was back, which is not a failure.
            has_lost_connections = any(cause.priority is CausePriority.collateral for cause in previous.causes)
            for node in sorted((previous.members & self._present) - members if has_lost_connections else ()):
                self._add_lost_node(previous, node, event.time)
            self._present = set(members)
            self._add_returned_nodes(previous, members)
        self.interruptions.append(Interruption(previous.world + 1, ranks, str(event.data.get("world", ""))))
        self._is_active = True

    def _add_returned_nodes(self, previous: Interruption, members: set[str]) -> None:
        """Add the nodes that the next world has in addition, if nothing but lost connections explains the end of the previous one.

        Ranks that stop for a node that can be reached again do not stop at the same moment: some lose their connections to others.
        """
        if previous.members and previous.members < members and all(each.priority is CausePriority.collateral for each in previous.causes):
            time = min((cause.time for cause in previous.causes), default=inf)
            for node in sorted(members - previous.members if time < inf else ()):
                previous.causes.append(RootCause(CausePriority.joined, time, node, f"{node} joined"))

    def _add_node_exit(self, event: Event) -> None:
        node, code = str(event.data.get("node", "a node")), event.data.get("exit_code")
        interruption = self._find_interruption_of(node)
        if interruption is not self.interruptions[-1] and node in self._present:
            return  # of a container that could not report its exit before another one replaced it
        self._present.discard(node)
        self._is_active = self._is_active and bool(self._present)
        if code is None:
            self._add_lost_node(interruption, node, event.time)
        elif code == EXIT_PLANNED:
            if not interruption.has_timeout_before(event.time):
                interruption.causes = [
                    cause for cause in interruption.causes if cause.node != node or cause.priority is not CausePriority.lost_node
                ]
            interruption.causes.append(RootCause(CausePriority.planned, event.time, node, f"{node} received a stop request"))
        elif code:
            error = f"exited with exit code {code}"
            failure = {"node": node, "error": error, "exit_code": code}
            interruption.causes.append(RootCause(CausePriority.lost_node, event.time, node, f"{node} {error}", failure))

    def _add_lost_node(self, interruption: Interruption, node: str, time: float) -> None:
        failure = {"node": node, "error": f"{node} stopped sending heartbeats"}
        interruption.causes.append(RootCause(CausePriority.lost_node, time, node, failure["error"], failure))

    def _add_joined_node(self, node: str, time: float) -> None:
        """Add the start of a node's supervisor. If it has joined before, and not left since, its predecessor has died silently."""
        if node in self._present and self.interruptions[-1].world:
            failure = {"node": node, "error": "its container or process ended without reporting a reason"}
            self._add(CausePriority.lost_node, time, node, f"{node} was restarted: {failure['error']}", failure)
        else:
            self._add(CausePriority.joined, time, node, f"{node} joined")
        self._present.add(node)

    def _find_interruption_of(self, node: str) -> Interruption:
        """Return the interruption of the newest world with this node: its loss may be noticed after the next world has formed."""
        return next((each for each in reversed(self.interruptions) if node in each.members), self.interruptions[-1])


def _describe_task_exit(task_exit: TaskExit) -> str:
    code = task_exit.exit_code
    if code == _EXIT_WITH_ENGINE:
        return "its container ended together with its machine or engine"
    if code is None:
        return task_exit.reason
    return "its container was killed" if code > 128 else f"its container exited with exit code {code}"  # 128 + number of the signal
