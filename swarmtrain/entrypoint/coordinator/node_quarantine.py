"""Quarantine of flaky nodes: which machines fail repeatedly, and which nodes are therefore excluded.

Pure: time comes from `clock` (seconds, monotonic); what to report is returned as an event. The rules:
- Only failures that a machine can cause count: a signal, a hang, a GPU or disk error, a supervisor that died. An exception of the script
  does not count, however often it occurs on one node: some rank raises it, and rank 0 is always on the same node.
- A node on which three worlds began to fail within an hour, and more than twice as many as on all others together, is flaky.
- It is quarantined for an hour if the other members are at least `min_nodes`; otherwise a warning is reported, once per hour.
- It may train again earlier if the others become too few, since a bad machine is better than none, or if a stop of the node was requested:
  the user who restarts it is assumed to have fixed it.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Set
from typing import Any

from swarmtrain.protocol import EVENT_NODE_QUARANTINED, EVENT_NODE_RELEASED, EVENT_NOTE, Event, is_collateral_failure

HOUR_SECONDS = 3600.0
FLAKY_FAILURE_COUNT = 3
"""Failures within an hour after which a node is considered flaky, if nearly all failures of the run were its own."""

_MACHINE_ERROR_PATTERN = re.compile(
    r"CUDA error|NCCL|cuDNN|cuBLAS|\bECC\b|\bXid\b|HIP error|OSError|\bErrno\b|input/output error|no space left|stale file|no such file"
    r"|hangs in step",
    re.IGNORECASE,
)


class NodeQuarantine:
    """Failures of machines, and the quarantined nodes."""

    def __init__(self, min_nodes: int, clock: Callable[[], float]) -> None:
        self._min_nodes, self._clock = min_nodes, clock
        self._failure_times: dict[str, deque[float]] = defaultdict(deque)
        self._counted_failures: set[tuple[str, str]] = set()
        self._last_warned: dict[str, float] = {}
        self._quarantined_until: dict[str, float] = {}

    @property
    def quarantined_nodes(self) -> Set[str]:
        return self._quarantined_until.keys()

    def record_machine_failure(self, world: str, node: str, members: Set[str]) -> Event | None:
        """Record that the machine of `node` caused the failure of `world`. Return an event to report, or None. `members`: current nodes."""
        if (world, node) not in self._counted_failures:  # a world that fails in several reports counts once
            self._counted_failures.add((world, node))
            self._failure_times[node].append(self._clock())
        recent_failures = self._count_recent_failures(node)
        if (
            node in self._quarantined_until
            or recent_failures < FLAKY_FAILURE_COUNT
            or recent_failures
            <= 2 * sum(self._count_recent_failures(other_node) for other_node in self._failure_times if other_node != node)
        ):
            return None
        reason = f"the first to fail {recent_failures} times within an hour, more than twice as often as all other nodes together"
        if node in members and len(self._list_eligible_nodes(members) - {node}) >= self._min_nodes:
            self._quarantined_until[node] = self._clock() + HOUR_SECONDS
            return Event(EVENT_NODE_QUARANTINED, {"node": node, "seconds": HOUR_SECONDS, "reason": reason})
        if self._clock() - self._last_warned.get(node, -HOUR_SECONDS) < HOUR_SECONDS:
            return None
        self._last_warned[node] = self._clock()
        return Event(
            EVENT_NOTE,
            {
                "node": node,
                "message": f"{node} was {reason}: check its machine; it is not quarantined, since fewer than min_nodes would remain",
            },
        )

    def clear_failure_record(self, node: str) -> None:
        """Clear the failure record of the node `node` after a stop of it was requested: if it comes back, it starts with a clean record."""
        self._quarantined_until.pop(node, None)
        self._failure_times.pop(node, None)

    def release_nodes(self, members: Set[str]) -> list[Event]:
        """Release quarantined nodes that may train again, and return an event for each."""
        events = [
            self._release_node(node, "its quarantine is over")
            for node, until in [*self._quarantined_until.items()]
            if until <= self._clock()
        ]
        while (quarantined_members := members & self._quarantined_until.keys()) and len(
            self._list_eligible_nodes(members)
        ) < self._min_nodes:
            node = min(quarantined_members, key=self._quarantined_until.__getitem__)
            events.append(self._release_node(node, f"the other nodes are fewer than min_nodes, {self._min_nodes}"))
        return events

    def _release_node(self, node: str, reason: str) -> Event:
        del self._quarantined_until[node]
        return Event(EVENT_NODE_RELEASED, {"node": node, "reason": reason})

    def _list_eligible_nodes(self, members: Set[str]) -> Set[str]:
        return members - self._quarantined_until.keys()

    def _count_recent_failures(self, node: str) -> int:
        return sum(failed_at > self._clock() - HOUR_SECONDS for failed_at in self._failure_times[node])


def is_machine_failure(failure: Mapping[str, Any]) -> bool:
    """Return whether a failure may be the fault of a machine, and is not merely collateral to another failure."""
    return not is_collateral_failure(failure) and bool(failure.get("signal") or _MACHINE_ERROR_PATTERN.search(str(failure.get("error"))))
