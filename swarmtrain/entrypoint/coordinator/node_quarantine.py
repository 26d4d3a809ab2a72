"""Quarantine of flaky nodes: which machines fail repeatedly, and which nodes are therefore excluded.

Pure: time comes from `clock` (seconds, monotonic); methods return the events to report. The rules:
- Only failures that a machine can cause count: a signal, a hang, a GPU or disk error, a supervisor that died. An exception of the script
  does not count, even if it always occurs on the same node: it may depend on the rank, and a rank such as 0 stays on its node.
- A node is flaky if it was the first to fail in at least three worlds within 1 h, and in more than twice as many as all other nodes
  together.
- A flaky node is quarantined for 1 h if at least `min_nodes` other members remain; otherwise a warning is reported, once per hour.
- A node whose GPU is faulty is quarantined at once, for a day, under the same condition.
- The quarantine ends early if fewer than `min_nodes` others remain, since a flaky machine is better than none. It also ends if a stop of
  the node is requested: the user who restarts the node is assumed to have fixed it.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Set
from typing import Any

from swarmtrain.protocol import EVENT_NODE_QUARANTINED, EVENT_NODE_RELEASED, EVENT_NOTE, Event, is_collateral_failure

HOUR_SECONDS = 3600.0
FAULT_QUARANTINE_SECONDS = 24 * HOUR_SECONDS
"""Seconds of quarantine for a node with a faulty GPU, which is not repaired by itself. A stop request of the node ends it."""
FLAKY_FAILURE_COUNT = 3
"""Failures within 1 h after which a node is considered flaky, if nearly all failures of the run were its own."""

_MACHINE_ERROR_PATTERN = re.compile(
    r"CUDA error|NCCL|cuDNN|cuBLAS|\bECC\b|\bXid\b|HIP error|OSError|\bErrno\b|input/output error|no space left|stale file|no such file"
    r"|hangs in step",
    re.IGNORECASE,
)


class NodeQuarantine:
    """Tracks failures that machines caused, and which nodes are quarantined."""

    def __init__(self, min_nodes: int, clock: Callable[[], float]) -> None:
        self._min_nodes, self._clock = min_nodes, clock
        self._failure_times: dict[str, deque[float]] = defaultdict(deque)
        self._counted_failures: set[tuple[str, str]] = set()
        self._last_warned: dict[str, float] = {}
        self._quarantined_until: dict[str, float] = {}
        self._faults: dict[str, str] = {}  # the first fault of a GPU of each node

    @property
    def quarantined_nodes(self) -> Set[str]:
        return self._quarantined_until.keys()

    def record_machine_failure(self, world: str, node: str, members: Set[str]) -> Event | None:
        """Record that the machine of `node` caused the failure of `world`. Return the event to report, or None."""
        if (world, node) not in self._counted_failures:  # several reports of the same failure count once
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
        reason = f"the first to fail {recent_failures} times within 1 h, more than twice as often as all other nodes together"
        return self._quarantine_or_warn(node, reason, members, HOUR_SECONDS)

    def record_gpu_fault(self, node: str, fault: str, members: Set[str]) -> Event | None:
        """Record that a GPU of `node` is faulty. Return the event to report, or None."""
        self._faults.setdefault(node, fault)
        return self._quarantine_or_warn(node, f"faulty: {fault}", members, FAULT_QUARANTINE_SECONDS)

    def quarantine_faulty_nodes(self, members: Set[str]) -> list[Event]:
        """Quarantine the nodes with faulty GPUs that were needed so far, and return the events to report."""
        events = [self.record_gpu_fault(node, fault, members) for node, fault in self._faults.items() if node in members]
        return [event for event in events if event]

    def _quarantine_or_warn(self, node: str, reason: str, members: Set[str], seconds: float) -> Event | None:
        """Quarantine `node` for `seconds` if enough other members remain. Return the event; a warning at most once per hour."""
        if node in self._quarantined_until:
            return None
        if node in members and len(self._list_eligible_nodes(members) - {node}) >= self._min_nodes:
            self._quarantined_until[node] = self._clock() + seconds
            return Event(EVENT_NODE_QUARANTINED, {"node": node, "seconds": seconds, "reason": reason})
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
        """Clear the failure record of the node `node` after a stop request: earlier failures do not count after a restart."""
        self._quarantined_until.pop(node, None)
        self._failure_times.pop(node, None)
        self._faults.pop(node, None)

    def release_nodes(self, members: Set[str]) -> list[Event]:
        """Release quarantined nodes that may train again, and return an event for each."""
        expired_nodes = [node for node, until in self._quarantined_until.items() if until <= self._clock()]
        events = [self._release_node(node, "its quarantine is over") for node in expired_nodes]
        for node in expired_nodes:
            self._faults.pop(node, None)
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
    """Return whether a machine may have caused `failure`, rather than another failure or the script."""
    return not is_collateral_failure(failure) and bool(failure.get("signal") or _MACHINE_ERROR_PATTERN.search(str(failure.get("error"))))
