"""Membership of nodes in a run, determined by the heartbeats that the coordinator receives.

Pure: time comes from `clock` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NODE_LOST_SECONDS = 30.0
"""Seconds without a heartbeat after which a node is considered lost."""
NODE_RESPONSIVE_SECONDS = 5.0
"""Seconds without a heartbeat after which the other nodes do not wait for a node. Nodes send one heartbeat per second."""


@dataclass
class _MemberState:
    last_heartbeat: float
    exit_code: int | None = None
    has_left: bool = False
    is_waiting: bool = False
    """Whether it has left, and repeats its report until the run is over."""


class Membership:
    """Nodes of one run that are currently members: they have registered, send heartbeats, and have not exited."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._nodes: dict[str, _MemberState] = {}

    def __contains__(self, name: object) -> bool:
        """Return whether the node `name` is a member: it has neither exited nor been declared lost."""
        return name in self._nodes and not self._nodes[str(name)].has_left

    @property
    def members(self) -> set[str]:
        return {name for name, node in self._nodes.items() if not node.has_left}

    @property
    def responsive_nodes(self) -> set[str]:
        earliest = self._clock() - NODE_RESPONSIVE_SECONDS
        return {name for name, node in self._nodes.items() if not node.has_left and node.last_heartbeat >= earliest}

    def find_silent_nodes(self, seconds: float) -> set[str]:
        """Return the members that have sent no heartbeat for more than `seconds` seconds, including those that are lost."""
        return {name for name, node in self._nodes.items() if node.exit_code is None and self._clock() - node.last_heartbeat > seconds}

    @property
    def has_no_active_nodes(self) -> bool:
        """Whether every node has exited or is lost, so that none uses the coordinator any more."""
        return all((node.has_left and not node.is_waiting) or self._is_lost(node) for node in self._nodes.values())

    def register_node(self, name: str) -> bool:
        """Register the start or restart of the supervisor of the node `name`.

        Return whether the previous supervisor of this node died without reporting its exit.
        """
        previous = self._nodes.get(name)
        self._nodes[name] = _MemberState(self._clock())
        return previous is not None and previous.exit_code is None

    def record_heartbeat(self, node_name: str) -> None:
        """Record a heartbeat of a node's supervisor."""
        node = self._nodes.setdefault(node_name, _MemberState(self._clock()))
        node.last_heartbeat, node.has_left = self._clock(), False

    def record_node_exit(self, name: str, exit_code: int) -> bool:
        """Record that a node reported its exit with `exit_code`. Return whether it has not reported it before."""
        is_new = name in self.members or name not in self._nodes or self._nodes[name].exit_code != exit_code
        self.record_heartbeat(name)
        self._nodes[name].exit_code, self._nodes[name].has_left = exit_code, True
        return is_new

    def set_waiting(self, name: str, *, is_waiting: bool) -> None:
        """Record whether a node that has left repeats its report until the run is over."""
        self._nodes[name].is_waiting = is_waiting

    def has_node_finished(self, name: str) -> bool:
        """Return whether the node `name` has exited with exit code 0."""
        return name in self._nodes and self._nodes[name].exit_code == 0

    def remove_lost_nodes(self) -> list[str]:
        """Remove the members that were lost since the last call, and return their names."""
        lost_nodes = [name for name, node in self._nodes.items() if not node.has_left and self._is_lost(node)]
        for name in lost_nodes:
            self._nodes[name].has_left = True
        return lost_nodes

    def _is_lost(self, node: _MemberState) -> bool:
        return self._clock() - node.last_heartbeat > NODE_LOST_SECONDS
