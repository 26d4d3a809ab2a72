"""Which nodes are here, by what the notice board hears of them.

Pure: time comes through `now` (seconds, monotonic).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SILENT = 30.0
"""Seconds without a beat after which a node is taken for lost."""
LIVELY = 5.0
"""Seconds without a beat, of which there is one a second, after which nobody waits for a node."""


@dataclass
class _Node:
    seen: float
    exit_code: int | None = None
    gone: bool = False


class Presence:
    """The nodes of one run, from the first that joins to the last that leaves."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._nodes: dict[str, _Node] = {}

    def __contains__(self, name: object) -> bool:
        """Whether a node is here, as far as is known: it has not left, and has not been found silent."""
        return name in self.here

    @property
    def here(self) -> set[str]:
        return {name for name, node in self._nodes.items() if not node.gone}

    @property
    def lively(self) -> set[str]:
        return {name for name in self.here if self._now() - self._nodes[name].seen <= LIVELY}

    @property
    def deserted(self) -> bool:
        """Whether nobody is left who could still listen."""
        return all(node.gone or self._silent(node) for node in self._nodes.values())

    def join(self, name: str) -> bool:
        """A node's supervisor has started, for the first time or again. Return whether the one before it died without a word."""
        before = self._nodes.get(name)
        self._nodes[name] = _Node(self._now())
        return before is not None and before.exit_code is None

    def see(self, name: str) -> None:
        """A node's supervisor lives."""
        node = self._nodes.setdefault(name, _Node(self._now()))
        node.seen, node.gone = self._now(), False

    def leave(self, name: str, exit_code: int) -> None:
        """A node has ended with `exit_code`, by its own word."""
        self.see(name)
        self._nodes[name].exit_code, self._nodes[name].gone = exit_code, True

    def has_finished(self, name: str) -> bool:
        """Whether a node has ended with success."""
        return name in self._nodes and self._nodes[name].exit_code == 0

    def lost(self) -> list[str]:
        """Return the nodes that have fallen silent since the last call, and take them for gone."""
        found = [name for name, node in self._nodes.items() if not node.gone and self._silent(node)]
        for name in found:
            self._nodes[name].gone = True
        return found

    def _silent(self, node: _Node) -> bool:
        return self._now() - node.seen > SILENT
