"""Which machines fail again and again, and which nodes sit out for that.

Pure: time comes through `now` (seconds, monotonic); what is to be told is returned as an event. The rules:

- What counts is what a machine can cause: a signal, a hang, an error of a GPU or a disk, a supervisor that died. An exception
  of the script is none, however often it is met on one node: a rank meets it, and rank 0 is always on the same node.
- A node on which three worlds have begun to fail within an hour, and more than twice as many as on all others together, is
  suspected.
- It sits out for an hour if the others that are here are `min_nodes` at least; else a person is told of it, once an hour.
- It may train again sooner when the others become fewer, since a bad machine is better than none, or when it has been told
  to leave: who starts it again has seen to it.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Set
from typing import Any

from swarmtrain.wire import LEFT_OUT, LET_IN, NOTE, Event, collateral

HOUR = 3600.0
SUSPECT = 3
"""Failures within an hour after which a node is suspected, if nearly all have been its own."""

_OF_A_MACHINE = re.compile(
    r"CUDA error|NCCL|cuDNN|cuBLAS|\bECC\b|\bXid\b|HIP error|OSError|\bErrno\b|input/output error|no space left|stale file|no such file"
    r"|hangs in step",
    re.IGNORECASE,
)


class Suspects:
    """The failures of machines, and the nodes that sit out."""

    def __init__(self, min_nodes: int, now: Callable[[], float]) -> None:
        self._min_nodes, self._now = min_nodes, now
        self._failures: dict[str, deque[float]] = defaultdict(deque)
        self._counted: set[tuple[str, str]] = set()
        self._told: dict[str, float] = {}
        self._until: dict[str, float] = {}

    @property
    def sitting_out(self) -> Set[str]:
        return self._until.keys()

    def failed(self, world: str, node: str, here: Set[str]) -> Event | None:
        """The machine of `node`, one of those that are `here`, is why `world` has failed. Return what is to be told, if anything."""
        if (world, node) not in self._counted:  # what dies bit by bit dies once
            self._counted.add((world, node))
            self._failures[node].append(self._now())
        times = self._recent(node)
        if node in self._until or times < SUSPECT or times <= 2 * sum(self._recent(other) for other in self._failures if other != node):
            return None
        why = f"the first to fail {times} times within an hour, more than twice as often as all others together"
        if node in here and len(self._able(here) - {node}) >= self._min_nodes:
            self._until[node] = self._now() + HOUR
            return Event(LEFT_OUT, {"node": node, "seconds": HOUR, "why": why})
        if self._now() - self._told.get(node, -HOUR) < HOUR:
            return None
        self._told[node] = self._now()
        return Event(NOTE, {"node": node, "message": f"{node} was {why}: is its machine sound? Without it there are fewer than min_nodes"})

    def left(self, node: str) -> None:
        """A node has been told to leave. If it comes back, it does so with nothing against it."""
        self._until.pop(node, None)
        self._failures.pop(node, None)

    def let_in(self, here: Set[str]) -> list[Event]:
        """Return which nodes may train again from now on."""
        found = [self._let_in(node, "its hour is over") for node, until in [*self._until.items()] if until <= self._now()]
        while (waiting := here & self._until.keys()) and len(self._able(here)) < self._min_nodes:
            node = min(waiting, key=self._until.__getitem__)
            found.append(self._let_in(node, f"the others are fewer than min_nodes, {self._min_nodes}"))
        return found

    def _let_in(self, node: str, why: str) -> Event:
        del self._until[node]
        return Event(LET_IN, {"node": node, "why": why})

    def _able(self, here: Set[str]) -> Set[str]:
        return here - self._until.keys()

    def _recent(self, node: str) -> int:
        return sum(time > self._now() - HOUR for time in self._failures[node])


def of_a_machine(failure: Mapping[str, Any]) -> bool:
    """Say whether a machine may be at fault for a failure, and it is no mere consequence of another."""
    return not collateral(failure) and bool(failure.get("signal") or _OF_A_MACHINE.search(str(failure.get("error"))))
