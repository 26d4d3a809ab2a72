"""Tracks the worlds of a run: those that are forming, the newest that has formed, their failures, and the ranks that wait.

Pure: time comes from `clock` (seconds, monotonic). A world is identified by its key (protocol.WorldAssignment), a failure by its world,
node and rank.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from swarmtrain.failure_text import find_peer_node
from swarmtrain.protocol import EVENT_RANKS_CONNECTING, ConnectingRank, ConnectingWorld, Event, is_collateral_failure

_NUMBER_PATTERN = re.compile(r"\d[\d.,]*")
_CONNECTING_EVENT_INTERVAL_SECONDS = 10.0
"""Minimum seconds between two events about the ranks that wait."""


@dataclass
class FormedWorld:
    """World that has formed: all its nodes have reported that they joined it."""

    key: str
    node_count: int
    ranks: dict[str, list[int]]
    formed_at: float
    finished_nodes: set[str] = field(default_factory=set)
    """Nodes of this world whose ranks have returned, so that this world cannot form again."""
    returned_ranks: set[int] = field(default_factory=set)

    @property
    def members(self) -> set[str]:
        return set(self.ranks)

    @property
    def is_finished(self) -> bool:
        """Whether all ranks of all nodes have returned."""
        return self.members <= self.finished_nodes

    def record_returned_rank(self, node: str, rank: int) -> bool:
        """Record that the script has returned on `rank` of `node`. Return whether it has now returned on all ranks of the node."""
        self.returned_ranks.add(rank)
        if not self.returned_ranks.issuperset(self.ranks.get(node, (rank + 1,))):
            return False
        self.finished_nodes.add(node)
        return True


@dataclass(frozen=True)
class FailureCause:
    """Cause of a world's failure, or a collateral failure that followed from it."""

    world: str
    data: dict[str, Any]

    @property
    def is_collateral(self) -> bool:
        return is_collateral_failure(self.data)

    @property
    def node(self) -> str:
        return str(self.data.get("node"))

    @property
    def failed_node_and_rank(self) -> str:
        """Node and rank that failed, formatted for a message."""
        rank = self.data.get("rank")
        return str(self.data.get("node", "a node")) + (f" rank {rank}" if rank is not None else "")

    @property
    def exit_code(self) -> int:
        """Exit code of the failed rank: 128 + N if signal N killed it; 1 if unknown."""
        if name := self.data.get("signal"):
            return 128 + getattr(signal, str(name), 0)
        code = self.data.get("exit_code")
        return code if isinstance(code, int) and code else 1


class WorldTracker:
    """Tracks the newest world, and the one that is forming."""

    def __init__(self) -> None:
        self.newest: FormedWorld | None = None
        self._forming: dict[str, dict[str, list[int]]] = {}
        self._addresses: dict[str, str] = {}

    def record_address(self, node: str, address: str) -> None:
        """Record the address at which the ranks of `node` communicate."""
        self._addresses[node] = address

    def add_node(self, node_report: Mapping[str, Any], timestamp: float) -> FormedWorld | None:
        """Record one node's report that it has joined a world. Return that world once all its nodes have reported, else None."""
        key, node_count = str(node_report["world"]), int(node_report["nodes"])
        ranks = self._forming.setdefault(key, {})
        ranks.update(node_report["ranks"])
        if len(ranks) < node_count:
            return None
        self._forming.clear()
        self.newest = FormedWorld(key, node_count, dict(ranks), timestamp)
        return self.newest

    def attribute_failure(self, failure: Mapping[str, Any], round: str) -> FailureCause:
        """Return the failure cause of an event, attributed to its world and to the failed rank.

        Another rank may have reported the failure. `round` is the current round, by which the failure of an agent is
        attributed: an agent does not know its world. The field `peer` is added if the error contains the address of another node.
        """
        attributed = {key: value for key, value in failure.items() if key != "failed_rank"}
        for node, ranks in self.newest.ranks.items() if self.newest and "failed_rank" in failure else ():
            if failure.get("failed_rank") in ranks:
                attributed |= {"node": node, "rank": failure["failed_rank"], "local_rank": ranks.index(failure["failed_rank"])}
        if peer := find_peer_node(str(failure.get("error")), str(attributed.get("node")), self._addresses):
            attributed["peer"] = peer
        if "world" in failure:
            return FailureCause(str(failure["world"]), attributed)
        failure_round = str(failure.get("round", round))
        return FailureCause(
            self.newest.key if self.newest and self.newest.key.startswith(f"{failure_round}/") else failure_round, attributed
        )

    @property
    def has_finished_node(self) -> bool:
        """Whether the newest world cannot form again, because one of its nodes has finished."""
        return self.newest is not None and bool(self.newest.finished_nodes)

    @property
    def unfinished_nodes(self) -> set[str]:
        """Nodes of the newest world that must still finish after another node has finished."""
        return self.newest.members - self.newest.finished_nodes if self.newest and self.has_finished_node else set()


class ReportedFailures:
    """Failures already reported in each world, so that none is printed twice."""

    def __init__(self) -> None:
        self._reported_ranks: set[tuple[str, str, int]] = set()
        self._reasons_by_world: dict[str, dict[str, bool]] = {}

    def record_failure_reason(self, cause: FailureCause) -> bool:
        """Record the reason of a failure. Return whether the reason is already known.

        The reason is known if another rank of this world has reported the same text (numbers may differ), or if the failure is collateral
        to a known failure.
        """
        reasons = self._reasons_by_world.setdefault(cause.world, {})
        reason = _NUMBER_PATTERN.sub("0", str(cause.data.get("error")))
        is_known = reason in reasons or (cause.is_collateral and not all(reasons.values()))
        reasons[reason] = cause.is_collateral
        return is_known

    def record_failure_report(self, cause: FailureCause, report: Mapping[str, Any]) -> bool:
        """Record a failure report. Return whether this is the first report of the failed rank.

        `report` is the failure before attribution; the rank that it names counts as reported, too.
        """
        is_new = _build_failed_rank_id(cause.world, cause.data) not in self._reported_ranks
        self._reported_ranks |= {_build_failed_rank_id(cause.world, report), _build_failed_rank_id(cause.world, cause.data)}
        return is_new


def _build_failed_rank_id(world: str, failure: Mapping[str, Any]) -> tuple[str, str, int]:
    return world, str(failure.get("node")), int(failure.get("rank", -1))


class ConnectingRanks:
    """The ranks of the newest world that wait in torch's init_process_group until their process group has formed.

    A rank reports itself repeatedly while it waits, and once when it has connected.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._waiting: dict[int, ConnectingRank] = {}
        self._newest_report: ConnectingRank | None = None
        self._last_arrival_at = 0.0
        self._published: dict[int, ConnectingRank] = {}
        self._next_event_at = float("-inf")

    def record_rank(self, report: ConnectingRank) -> ConnectingWorld:
        """Record the report of a rank. Return the state of its world."""
        if self._newest_report is None or report.world != self._newest_report.world:
            self._waiting = {}
        self._newest_report = report
        if not report.waits:
            self._waiting.pop(report.rank, None)
        elif report.rank not in self._waiting:
            self._waiting[report.rank] = report
            self._last_arrival_at = self._clock()
        return ConnectingWorld(len(self._waiting), self._clock() - self._last_arrival_at)

    def take_event(self) -> Event | None:
        """Return the event to publish, if the set of ranks that wait has changed and the last event is old enough."""
        if self._newest_report is None or self._waiting == self._published or self._clock() < self._next_event_at:
            return None
        self._published, self._next_event_at = dict(self._waiting), self._clock() + _CONNECTING_EVENT_INTERVAL_SECONDS
        ranks: dict[str, list[int]] = {}
        for rank, report in sorted(self._waiting.items()):
            ranks.setdefault(report.node, []).append(rank)
        world = {name: getattr(self._newest_report, name) for name in ("world", "world_size", "address")}
        return Event(EVENT_RANKS_CONNECTING, {**world, "ranks": ranks})
