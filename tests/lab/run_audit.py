"""The history of a run, read only from its ranks' audit files: which world made which step, with which samples and which loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class AuditLine:
    """One step of one rank in one world."""

    generation: int
    rank: int
    step: int
    samples: tuple[int, ...]
    loss: float


@dataclass(frozen=True)
class RunAudit:
    """All audit lines of a run's ranks."""

    lines: tuple[AuditLine, ...]

    @cached_property
    def worlds(self) -> dict[int, dict[int, list[AuditLine]]]:
        """Generation → step → the lines of its ranks, sorted by generation. Worlds without a step are missing."""
        found: dict[int, dict[int, list[AuditLine]]] = {}
        for line in sorted(self.lines, key=lambda line: (line.generation, line.step, line.rank)):
            found.setdefault(line.generation, {}).setdefault(line.step, []).append(line)
        return found

    @cached_property
    def final_lines(self) -> dict[int, list[AuditLine]]:
        """Step → its final lines: those of the last world that made the step."""
        return {step: lines for steps in self.worlds.values() for step, lines in steps.items()}

    @property
    def world_sizes(self) -> list[int]:
        """The number of ranks of each world."""
        return [len({line.rank for lines in steps.values() for line in lines}) for steps in self.worlds.values()]

    @property
    def lost_steps(self) -> int:
        """The number of steps that a rank had completed and that a later world recomputed."""
        return sum(max(0, max(before) - min(after) + 1) for before, after in pairwise(self.worlds.values()))


def read_audit(folder: Path) -> RunAudit:
    """Read the audit files of `folder`. A truncated line is ignored."""
    return RunAudit(tuple(line for file in sorted(folder.glob("world-*-rank-*.jsonl")) for line in _read_lines(file)))


def find_problems(actual: RunAudit, expected: RunAudit, tolerance: float) -> list[str]:
    """Return the differences of `actual` from `expected`: steps, samples, and losses that differ by more than `tolerance` (relative)."""
    if missing := sorted(expected.final_lines.keys() - actual.final_lines.keys()):
        return [f"steps {missing} were never made"]
    return [problem for step in expected.final_lines for problem in _find_differences(actual, expected, step, tolerance)]


def compute_largest_difference(actual: RunAudit, expected: RunAudit) -> float:
    """Return the largest relative difference between two losses of a step."""
    pairs = [(actual.final_lines[step][0].loss, lines[0].loss) for step, lines in expected.final_lines.items()]
    return max(abs(ours / theirs - 1) for ours, theirs in pairs)


def _find_differences(actual: RunAudit, expected: RunAudit, step: int, tolerance: float) -> Iterator[str]:
    actual_lines, expected_lines = actual.final_lines[step], expected.final_lines[step]
    expected_samples = sorted(sample for line in expected_lines for sample in line.samples)
    actual_samples = sorted(sample for line in actual_lines for sample in line.samples)
    # A killed rank may have taken part in its world's last step without writing it to its audit file.
    last = step == max(actual.worlds[actual_lines[0].generation])
    if actual_samples != expected_samples and not (
        last and len(set(actual_samples)) == len(actual_samples) and set(actual_samples) < set(expected_samples)
    ):
        yield f"step {step} had the samples {actual_samples}, not {expected_samples}"
    if len({line.loss for line in actual_lines}) > 1:
        yield f"step {step}: its ranks know different losses"
    if abs(actual_lines[0].loss / expected_lines[0].loss - 1) > tolerance:
        yield f"step {step} had the loss {actual_lines[0].loss!r}, not {expected_lines[0].loss!r}"


def _read_lines(file: Path) -> Iterator[AuditLine]:
    for text in file.read_text().splitlines(keepends=True):
        if text.endswith("\n"):
            record = json.loads(text)
            yield AuditLine(record["generation"], record["rank"], record["step"], tuple(record["samples"]), record["loss"])
