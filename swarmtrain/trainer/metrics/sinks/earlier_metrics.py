"""Metrics that a run logged before it was resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResumeHistory:
    """Metrics lines of the steps up to and including `step`, the step from which the run resumes. Empty if the run has no metrics file."""

    step: int
    lines: Sequence[dict[str, Any]]

    @property
    def last_step_lines(self) -> list[dict[str, Any]]:
        """Metrics lines whose step is `step`."""
        return [line for line in self.lines if line["step"] == self.step]

    @property
    def last_step_metric_names(self) -> frozenset[str]:
        """Names of the metrics that were already logged for `step`."""
        return frozenset(name for line in self.last_step_lines for name in line)
