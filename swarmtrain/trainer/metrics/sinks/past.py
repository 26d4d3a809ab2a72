"""What a run had told before this world."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Past:
    """The lines of the steps up to `step`, after which the world goes on. None where the run keeps no file of them."""

    step: int
    lines: Sequence[dict[str, Any]]

    @property
    def last(self) -> list[dict[str, Any]]:
        """The lines of `step` itself."""
        return [line for line in self.lines if line["step"] == self.step]

    @property
    def names(self) -> frozenset[str]:
        """What is known of `step` itself."""
        return frozenset(name for line in self.last for name in line)
