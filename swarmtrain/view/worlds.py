"""Worlds of a run, computed from its events: for each world its nodes, its start, and the reason why it formed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from swarmtrain import protocol
from swarmtrain.failure_text import describe_error
from swarmtrain.protocol import EXIT_PLANNED, Event, is_collateral_failure
from swarmtrain.view.root_cause import list_interruptions


@dataclass(frozen=True)
class WorldInfo:
    """One world of a run. `number` is 1-based; it formed at `time`, in seconds since the epoch, for `reason` (empty for the first)."""

    number: int
    time: float
    nodes: int
    ranks: int
    reason: str = ""


@dataclass(frozen=True)
class NodeRestarts:
    """Rank restarts that one node caused: their number, and the time (seconds since the epoch) and reason of the last one."""

    count: int
    time: float
    reason: str


@dataclass(frozen=True)
class QuarantinedNode:
    """Node that is quarantined because it failed repeatedly. `until` is in seconds since the epoch."""

    until: float
    reason: str


@dataclass(frozen=True)
class NodeGpuFault:
    """Fault of a GPU, or another finding about it, that a node reported at `time`, in seconds since the epoch."""

    node: str
    time: float
    message: str
    hint: str
    is_hardware: bool

    def __str__(self) -> str:
        return f"{self.node}: {self.message}"


def list_worlds(events: Sequence[Event]) -> list[WorldInfo]:
    """Return the worlds that have formed, in chronological order."""
    formed = [event for event in events if event.kind == protocol.EVENT_WORLD_FORMED]
    worlds: list[WorldInfo] = []
    for event, before in zip(formed, list_interruptions(events), strict=False):
        members = set(event.data.get("ranks") or ())
        cause = before.root_cause
        reason = (cause.text if cause else _describe_new_nodes(before.members, members)) if worlds else ""
        worlds.append(WorldInfo(len(worlds) + 1, event.time, int(event.data.get("nodes", 0)), int(event.data.get("world_size", 0)), reason))
    return worlds


def count_restarts(events: Iterable[Event]) -> dict[str, NodeRestarts]:
    """Return, by node name, the number of times that the node caused ranks to restart, and the time and reason of the last restart.

    Several failures of a node before the next world are one restart. A failure that ends the run is none.
    """
    restarts_by_node: dict[str, NodeRestarts] = {}
    causes: dict[str, tuple[float, str]] = {}  # of the restart that the next world completes
    joined_nodes: set[str] = set()
    for event in events:
        node = str(event.data.get("node", ""))
        cause = ""
        if event.kind == protocol.EVENT_NODE_JOINED:
            cause = "the node was restarted" if node in joined_nodes else ""
            joined_nodes.add(node)
        elif event.kind == protocol.EVENT_NODE_LEFT and event.data.get("exit_code") == EXIT_PLANNED:
            joined_nodes.discard(node)  # a node that exited gracefully has not been restarted when it comes back
        elif event.kind == protocol.EVENT_FAILURE and not is_collateral_failure(event.data):
            cause = describe_error(event.data)
        elif event.kind == protocol.EVENT_WORLD_FORMED:
            _add_restarts(restarts_by_node, causes)
            causes = {}
        elif event.kind == protocol.EVENT_OUTCOME:
            causes = {}
        if cause:
            causes[node] = event.time, cause
    _add_restarts(restarts_by_node, causes)
    return restarts_by_node


def _add_restarts(restarts_by_node: dict[str, NodeRestarts], causes: Mapping[str, tuple[float, str]]) -> None:
    for node, (time, reason) in causes.items():
        restarts_by_node[node] = NodeRestarts(restarts_by_node[node].count + 1 if node in restarts_by_node else 1, time, reason)


def find_quarantined_nodes(events: Iterable[Event]) -> dict[str, QuarantinedNode]:
    """Return the nodes that are quarantined now, by name."""
    quarantined: dict[str, QuarantinedNode] = {}
    for event in events:
        if event.kind == protocol.EVENT_NODE_QUARANTINED:
            quarantined[str(event.data["node"])] = QuarantinedNode(event.time + float(event.data["seconds"]), str(event.data["reason"]))
        elif event.kind == protocol.EVENT_NODE_RELEASED or (
            event.kind == protocol.EVENT_NODE_LEFT and event.data.get("exit_code") == EXIT_PLANNED
        ):
            quarantined.pop(str(event.data["node"]), None)
        elif event.kind in (protocol.EVENT_COORDINATOR_STARTED, protocol.EVENT_OUTCOME):
            quarantined.clear()
    return quarantined


def find_gpu_faults(events: Iterable[Event]) -> list[NodeGpuFault]:
    """Return the faults of GPUs, oldest first, without those of nodes that have been stopped since then, and so may be repaired.

    A coordinator that was restarted has published a fault again.
    """
    faults: dict[tuple[str, str], NodeGpuFault] = {}
    for event in events:
        node, data = str(event.data.get("node")), event.data
        if event.kind == protocol.EVENT_GPU_FAULT:
            fault = NodeGpuFault(node, event.time, str(data["message"]), str(data["hint"]), bool(data["is_hardware"]))
            faults.setdefault((node, fault.message), fault)
        elif event.kind == protocol.EVENT_NODE_LEFT and data.get("exit_code") == EXIT_PLANNED:
            faults = {key: fault for key, fault in faults.items() if fault.node != node}
    return list(faults.values())


def _describe_new_nodes(previous_members: set[str], members: set[str]) -> str:
    """Return text that names the new nodes of a world; empty if unknown. They may have joined too late for the previous world."""
    new = ", ".join(sorted(members - previous_members)) if previous_members else ""
    return f"{new} joined" if new else ""
