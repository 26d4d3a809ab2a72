"""Checks: functions that take evidence and yield findings. A registry reports them in registration order.

@CHECKS("quorum", "the managers can agree")
def _check_quorum(snapshot: ClusterSnapshot) -> Iterator[Finding]: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarmtrain.launchers.base import CheckResult, Finding

EvidenceT = TypeVar("EvidenceT")


@dataclass(frozen=True)
class Check(Generic[EvidenceT]):
    """A check of the doctor: its name, its function, and the `expectation` that holds if it returns no finding."""

    name: str
    expectation: str
    run_check: Callable[[EvidenceT], Iterator[Finding]]


class CheckRegistry(Generic[EvidenceT]):
    """Registry of the checks on one type of evidence, in report order."""

    def __init__(self) -> None:
        self.checks: list[Check[EvidenceT]] = []

    def run_checks(self, evidence: EvidenceT) -> tuple[CheckResult, ...]:
        """Run all checks on `evidence`, and return their results."""
        return tuple(CheckResult(check.name, check.expectation, tuple(check.run_check(evidence))) for check in self.checks)

    def __call__(
        self, name: str, expectation: str
    ) -> Callable[[Callable[[EvidenceT], Iterator[Finding]]], Callable[[EvidenceT], Iterator[Finding]]]:
        """Return a decorator that registers a function as the check `name`."""

        def register(run_check: Callable[[EvidenceT], Iterator[Finding]]) -> Callable[[EvidenceT], Iterator[Finding]]:
            self.checks.append(Check(name, expectation, run_check))
            return run_check

        return register
