"""Barrier of a rendezvous round: nodes start together, so that the first nodes do not form a world that ends when another node arrives.

Pure: time comes from `clock` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable, Set

BARRIER_TIMEOUT_SECONDS = 60.0
"""Seconds after which the nodes that have arrived start without the missing nodes."""
COORDINATOR_WARMUP_SECONDS = 2.5
"""Seconds after its start in which the coordinator may not have received a heartbeat (one per second) from every live node."""


class RendezvousBarrier:
    """Barrier of the next rendezvous round: the nodes that have arrived, and those that are still expected."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._announced: dict[str, float] = {}
        self._started_at = clock()
        self._round = ""
        self._arrived: set[str] = set()
        self._round_started_at = 0.0

    def expect_node(self, name: str) -> None:
        """Record that the supervisor of node `name` has started. The barrier waits for this node, which imports torch first."""
        self._announced[name] = self._clock()
        self._arrived.discard(name)

    def register_arrival(self, round: str, node_name: str, expected_nodes: Set[str]) -> bool:
        """Register that the node `node_name` is ready for `round`. Return whether the round starts.

        `expected_nodes`: live nodes whose arrival the round waits for, for at most BARRIER_TIMEOUT_SECONDS.
        """
        if round != self._round:
            self._round, self._arrived, self._round_started_at = round, set(), self._clock()
        self._arrived.add(node_name)
        self._announced.pop(node_name, None)
        announced = {
            announced_node
            for announced_node, announced_at in self._announced.items()
            if self._clock() - announced_at <= BARRIER_TIMEOUT_SECONDS
        }
        is_complete = self._clock() - self._started_at > COORDINATOR_WARMUP_SECONDS and (expected_nodes | announced) <= self._arrived
        return is_complete or self._clock() - self._round_started_at > BARRIER_TIMEOUT_SECONDS

    def forget_node(self, name: str) -> None:
        """Stop waiting for the node `name`, which has exited."""
        self._announced.pop(name, None)
