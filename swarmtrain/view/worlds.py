"""Worlds of a run, computed from its events: for each world its nodes, its start, and the reason why it formed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmtrain import protocol
from swarmtrain.failure_text import describe_error
from swarmtrain.protocol import EXIT_PLANNED, Event, is_collateral_failure
from swarmtrain.view.root_cause import list_interruptions

_ENDS_OF_CONNECTING = (
    protocol.EVENT_COORDINATOR_STARTED,
    protocol.EVENT_WORLD_FORMED,
    protocol.EVENT_PROGRESS,
    protocol.EVENT_FAILURE,
    protocol.EVENT_OUTCOME,
)
"""Kinds of events after which ranks that waited before do so no longer."""


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


@dataclass(frozen=True)
class WaitingRanks:
    """Ranks of the newest world that wait in torch's init_process_group for rank 0, since `time`."""

    time: float
    world_size: int
    address: str
    ranks: Mapping[str, Sequence[int]]
    """The ranks that wait, by node name."""

    def __str__(self) -> str:
        waiting = {rank for ranks in self.ranks.values() for rank in ranks}
        text = f"{_format_ranks(sorted(waiting))} on {', '.join(self.ranks)} wait{'s' * (len(waiting) == 1)} for rank 0 at {self.address}"
        missing = [rank for rank in range(self.world_size) if rank not in waiting]
        return f"{text}; {_format_ranks(missing)} {'has' if len(missing) == 1 else 'have'} not started to connect" if missing else text


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return sorted rank numbers as text, in ranges: ranks 0-3, 5."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"rank{'s' * (len(ranks) != 1)} {text}"


def build_connecting_ranks(data: Mapping[str, Any], time: float = 0.0) -> WaitingRanks | None:
    """Return the ranks in the data of a connecting event; None if no rank waits any more."""
    return WaitingRanks(time, data["world_size"], data["address"], data["ranks"]) if data["ranks"] else None


def find_connecting_ranks(events: Sequence[Event]) -> WaitingRanks | None:
    """Return the ranks of the newest world that wait for their process group; None if none does, or the run has ended."""
    for event in reversed(events):
        if event.kind == protocol.EVENT_RANKS_CONNECTING:
            return build_connecting_ranks(event.data, event.time)
        if event.kind in _ENDS_OF_CONNECTING:
            return None
    return None


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
