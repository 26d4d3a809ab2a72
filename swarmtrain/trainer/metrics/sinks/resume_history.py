"""What a run had logged before this world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ResumeHistory:
    """The lines up to `step`, from which the world resumes. Empty if the run keeps no metrics file."""

    step: int
    lines: Sequence[dict[str, Any]]

    @property
    def last_step_lines(self) -> list[dict[str, Any]]:
        """The lines of `step` itself."""
        return [line for line in self.lines if line["step"] == self.step]

    @property
    def last_step_names(self) -> frozenset[str]:
        """Names of the values that are known for `step` itself."""
        return frozenset(name for line in self.last_step_lines for name in line)
