"""Checks: small functions from what was seen to what is wrong, each registered under a name, in the order in which they are told.

@check("quorum", "the managers can agree")
def _quorum(seen: Cluster) -> Iterator[Finding]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarmtrain.launchers.base import Finding

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Check(Generic[Seen]):
    """One question: `asks` is what holds when it finds nothing."""

    name: str
    asks: str
    find: Callable[[Seen], Iterator[Finding]]


class Checks(Generic[Seen]):
    """A list of checks on one kind of evidence."""

    def __init__(self) -> None:
        self.all: list[Check[Seen]] = []

    def __call__(self, name: str, asks: str) -> Callable[[Callable[[Seen], Iterator[Finding]]], Callable[[Seen], Iterator[Finding]]]:
        """Register the decorated function."""

        def register(find: Callable[[Seen], Iterator[Finding]]) -> Callable[[Seen], Iterator[Finding]]:
            self.all.append(Check(name, asks, find))
            return find

        return register
