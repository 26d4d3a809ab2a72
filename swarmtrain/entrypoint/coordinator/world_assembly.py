"""Assigns nodes to worlds: which nodes form the next world, in which order, and when the newest world is over.

The agents of nodes request the next world. It forms when all nodes that are present have requested it, so that the first of them do not
form a world that ends when another arrives. Pure: time comes from `clock` (seconds, monotonic). The rules:
- A world is over when a rank has failed in it, when one of its nodes has left it or was lost, or when further nodes wait to join.
- Nodes are ranked in the order of their numbers. Rank 0 is on the first.
- A restarted agent is a new member, also on the same node.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from swarmtrain.protocol import WorldAssignment, WorldRequest

ASSEMBLY_TIMEOUT_SECONDS = 60.0
"""Seconds after which the nodes that have requested a world form it without the missing nodes."""
REQUEST_TIMEOUT_SECONDS = 10.0
"""Seconds after which a request counts no more if its agent does not repeat it. Agents repeat it at least every 5 s."""
COORDINATOR_WARMUP_SECONDS = 2.5
"""Seconds from the coordinator's start until it has received a heartbeat (one per second) from every live node."""


@dataclass
class _AssignedWorld:
    key: str
    members: dict[str, WorldRequest]
    """Requests of its nodes, in the order of their ranks."""
    over_at: float = float("inf")


class WorldAssembly:
    """The newest world of a round, and the nodes that wait for the next one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started_at = clock()
        self._announced: dict[str, float] = {}
        self._round = ""
        self._world: _AssignedWorld | None = None
        self._number = 0
        self._requests: dict[str, WorldRequest] = {}
        self._requested_at: dict[str, float] = {}
        self._first_request_at = 0.0

    @property
    def state(self) -> tuple[str, bool]:
        """Key of the newest world, and whether it is over: what nodes wait for has changed if this has."""
        return (self._world.key, self._is_world_over) if self._world else ("", True)

    @property
    def _is_world_over(self) -> bool:
        return self._world is None or self._clock() >= self._world.over_at

    def expect_node(self, name: str) -> None:
        """Record that the supervisor of node `name` has started. Worlds wait for this node, which imports torch first."""
        self._announced[name] = self._clock()
        self._requests.pop(name, None)

    def forget_node(self, name: str, *, has_finished: bool) -> None:
        """Stop waiting for the node `name`, which has exited or was lost. Its world is over, unless it `has_finished`."""
        self._announced.pop(name, None)
        self._requests.pop(name, None)
        if self._world and name in self._world.members and not has_finished:
            self.end_world(self._world.key)

    def add_request(self, request: WorldRequest) -> bool:
        """Record that the agent of a node waits for the next world of its round. An agent repeats its request while it waits.

        Return False if the newest world is the one that it requests.
        """
        if request.round != self._round:
            self._round, self._world, self._requests = request.round, None, {}
        member = self._world.members.get(request.node) if self._world else None
        if self._world and member:
            if member.agent == request.agent and request.previous_world != self._world.key:
                return False  # the response with its assignment was lost, or is about to be sent
            self.end_world(self._world.key)
        if not self._requests:
            self._first_request_at = self._clock()
        self._announced.pop(request.node, None)
        self._requests[request.node], self._requested_at[request.node] = request, self._clock()
        return True

    def get_assignment(self, request: WorldRequest) -> WorldAssignment:
        """Return the ranks of the node that has made `request`; an assignment without a world if it has not formed yet."""
        world = self._world
        if world is None or request.node in self._requests or request.node not in world.members:
            return WorldAssignment()
        leader = next(iter(world.members.values()))
        return WorldAssignment(
            world=world.key,
            group_rank=list(world.members).index(request.node),
            node_count=len(world.members),
            address=leader.address,
            port=leader.port,
            has_equal_slots=len({member.slots for member in world.members.values()}) == 1,
        )

    def is_over(self, world: str) -> bool:
        """Return whether a world of the current round is over."""
        return world.startswith(f"{self._round}/") and (self._world is None or self._world.key != world or self._is_world_over)

    def end_world(self, world: str, delay: float = 0.0) -> None:
        """Make the newest world, if it is `world`, end in `delay` seconds, unless it ends earlier."""
        if self._world and self._world.key == world:
            self._world.over_at = min(self._world.over_at, self._clock() + delay)

    def update(self, responsive_nodes: Set[str], excluded_nodes: Set[str], *, can_interrupt: bool) -> None:
        """Form the next world if its nodes have arrived, or end the newest one for nodes that wait to join it.

        `responsive_nodes`: nodes whose supervisors have sent a heartbeat lately. `excluded_nodes`: those that may not train.
        `can_interrupt`: whether the newest world may end before its ranks have failed.
        """
        now = self._clock()
        for node in [node for node, at in self._requested_at.items() if now - at > REQUEST_TIMEOUT_SECONDS]:
            del self._requested_at[node]
            self._requests.pop(node, None)
        announced = {node for node, at in self._announced.items() if now - at <= ASSEMBLY_TIMEOUT_SECONDS}
        missing = (responsive_nodes | announced) - excluded_nodes - self._requests.keys()
        has_timed_out = bool(self._requests) and now - self._first_request_at > ASSEMBLY_TIMEOUT_SECONDS
        if self._world and not self._is_world_over:
            members = self._world.members.keys()
            has_room = len(members) < max((request.max_nodes for request in self._requests.values()), default=0)
            if can_interrupt and has_room and (missing <= members or has_timed_out):
                self.end_world(self._world.key)
        elif self._has_enough_nodes and (not missing or has_timed_out) and now - self._started_at > COORDINATOR_WARMUP_SECONDS:
            self._form_world()

    @property
    def _has_enough_nodes(self) -> bool:
        return bool(self._requests) and len(self._requests) >= max(request.min_nodes for request in self._requests.values())

    def _form_world(self) -> None:
        self._number += 1
        max_nodes = min(request.max_nodes for request in self._requests.values())
        names = sorted(self._requests, key=lambda name: (len(name), name))[:max_nodes]
        self._world = _AssignedWorld(f"{self._round}/{self._number}", {name: self._requests.pop(name) for name in names})
        self._first_request_at = self._clock()
