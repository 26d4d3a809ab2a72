"""A row of the acceptance run: one check or one measurement."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

_TRACEBACK_LINES = 6


class Outcome(StrEnum):
    """What became of a check."""

    passed = "passed"
    failed = "failed"
    missed = "missed"
    """A measurement that did not reach its goal; everything is correct."""
    measured = "measured"
    """A measurement without a goal."""
    skipped = "skipped"


@dataclass(frozen=True)
class Row:
    """One check or measurement, with its `values` by name: numbers with their unit in the name, or text."""

    name: str
    outcome: Outcome = Outcome.measured
    values: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Why the check failed or was skipped, or which goal was missed."""

    @classmethod
    def from_check(cls, name: str, passed: bool, values: Mapping[str, Any], reason: str) -> Self:
        """Return a row that passed, or failed for `reason`."""
        return cls(name, Outcome.passed if passed else Outcome.failed, values, "" if passed else reason)

    @classmethod
    def from_goal(cls, name: str, reached: bool, values: Mapping[str, Any], goal: str) -> Self:
        """Return a row that reached `goal`, which describes the goal, or missed it."""
        return cls(name, Outcome.passed if reached else Outcome.missed, values, "" if reached else f"goal: {goal}")

    @classmethod
    def from_error(cls, name: str, error: BaseException) -> Self:
        """Return a row that failed with `error`, with the end of its traceback."""
        return cls(name, Outcome.failed, reason="".join(traceback.format_exception(error, limit=-_TRACEBACK_LINES)).strip())

    def format_values(self) -> str:
        """Return the values as text, with the unit that each name ends with."""
        return ", ".join(f"{name.replace('_', ' ')} {_format_value(value)}" for name, value in self.values.items())


def _format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
