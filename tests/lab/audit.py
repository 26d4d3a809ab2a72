"""What a run did, read from its ranks' audit files alone: which world made which step, of which samples, with which loss."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Line:
    """One step of one rank of one world."""

    token: int
    rank: int
    step: int
    samples: tuple[int, ...]
    loss: float


@dataclass(frozen=True)
class Story:
    """All that the ranks of a run wrote down."""

    lines: tuple[Line, ...]

    @cached_property
    def worlds(self) -> dict[int, dict[int, list[Line]]]:
        """Token → step → what its ranks say of it, in the order of tokens; worlds that made no step are not here."""
        found: dict[int, dict[int, list[Line]]] = {}
        for line in sorted(self.lines, key=lambda line: (line.token, line.step, line.rank)):
            found.setdefault(line.token, {}).setdefault(line.step, []).append(line)
        return found

    @cached_property
    def final(self) -> dict[int, list[Line]]:
        """Step → what stands of it: what the last world that made it says."""
        return {step: lines for steps in self.worlds.values() for step, lines in steps.items()}

    @property
    def sizes(self) -> list[int]:
        """Ranks of each world."""
        return [len({line.rank for lines in steps.values() for line in lines}) for steps in self.worlds.values()]

    @property
    def lost(self) -> int:
        """Steps that a rank had finished and that a later world made again."""
        return sum(max(0, max(before) - min(after) + 1) for before, after in pairwise(self.worlds.values()))


def read(folder: Path) -> Story:
    """Return what stands in the audit files of `folder`; a line that is cut off counts for nothing."""
    return Story(tuple(line for file in sorted(folder.glob("world-*-rank-*.jsonl")) for line in _lines(file)))


def problems(story: Story, undisturbed: Story, tolerance: float) -> list[str]:
    """Return what `story` has otherwise than `undisturbed`: steps, samples, losses by more than `tolerance` (relative)."""
    if missing := sorted(undisturbed.final.keys() - story.final.keys()):
        return [f"steps {missing} were never made"]
    return [problem for step in undisturbed.final for problem in _differences(story, undisturbed, step, tolerance)]


def largest_difference(story: Story, undisturbed: Story) -> float:
    """Return the largest relative difference of a loss."""
    pairs = [(story.final[step][0].loss, lines[0].loss) for step, lines in undisturbed.final.items()]
    return max(abs(ours / theirs - 1) for ours, theirs in pairs)


def _differences(story: Story, undisturbed: Story, step: int, tolerance: float) -> Iterator[str]:
    ours, theirs = story.final[step], undisturbed.final[step]
    wanted = sorted(sample for line in theirs for sample in line.samples)
    seen = sorted(sample for line in ours for sample in line.samples)
    # The rank that has died did its part of its world's last step, and could not write it down.
    last = step == max(story.worlds[ours[0].token])
    if seen != wanted and not (last and len(set(seen)) == len(seen) and set(seen) < set(wanted)):
        yield f"step {step} had the samples {seen}, not {wanted}"
    if len({line.loss for line in ours}) > 1:
        yield f"step {step}: its ranks know different losses"
    if abs(ours[0].loss / theirs[0].loss - 1) > tolerance:
        yield f"step {step} had the loss {ours[0].loss!r}, not {theirs[0].loss!r}"


def _lines(file: Path) -> Iterator[Line]:
    for text in file.read_text().splitlines(keepends=True):
        if text.endswith("\n"):
            said = json.loads(text)
            yield Line(said["token"], said["rank"], said["step"], tuple(said["samples"]), said["loss"])
