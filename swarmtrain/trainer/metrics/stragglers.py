"""Which rank the others wait for, and since when that is worth a word.

Ranks are compared that have the same layers: in a pipeline, the stages have other things to do beside them.

Pure. A false alarm is worse than none: what counts is by how much a whole step would be shorter if that rank worked as fast
as the median one, and that it has been so in each comparison for two minutes at least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from swarmtrain.trainer.metrics.pace import Work

SLOW = 0.2
"""By which part a step must be longer than it would be without the slowest rank."""
IN_A_ROW = 12
"""Comparisons in a row that must agree."""
_WHOLE = 3
"""How many times as long as its forward pass a pass takes: the backward pass costs twice as much."""
_WORDS = {"data": "data is slow to come there", "compute": "computing is slower there"}


@dataclass(frozen=True)
class Slowest:
    """A rank that takes longer for its work than the median rank."""

    rank: int
    node: str
    by: float
    """By which part a step is longer for that."""
    part: str
    """data or compute: where most of it goes."""


@dataclass(frozen=True)
class Report:
    """What is to be told. `slowest` None: of whom was told before keeps up again."""

    slowest: Slowest | None
    message: str


def slower(everybody: Sequence[Work]) -> list[Slowest]:
    """Return the ranks that others wait for, however little, the slowest first."""
    working = [work for work in everybody if work.passes]
    if not working:
        return []
    data, step = median_low(work.data for work in working), median_low(work.step for work in working)
    passes = max(work.passes for work in working)
    blocks = {stage: median_low(work.block for work in working if work.stage == stage) for stage in {work.stage for work in working}}
    found = []
    for rank, work in enumerate(everybody):
        block = blocks.get(work.stage, 0.0)
        parts = {"data": work.passes * (work.data - data), "compute": _WHOLE * work.passes * work.blocks * (work.block - block)}
        part = max(parts, key=parts.__getitem__)
        # Who was dealt less than others may take longer for it, and nobody waits.
        usual = passes * (data + _WHOLE * work.blocks * block)
        extra = min(parts[part], work.passes * (work.data + _WHOLE * work.blocks * work.block) - usual, step)
        if extra > 0:
            found.append(Slowest(rank, work.node, extra / max(step - extra, usual), part))
    return sorted(found, key=lambda each: -each.by)


class Stragglers:
    """Judges one world's comparisons."""

    def __init__(self) -> None:
        self._rows: deque[dict[tuple[int, str], Slowest]] = deque(maxlen=IN_A_ROW)
        self._told: tuple[str, str] | None = None

    def judge(self, found: Sequence[Slowest]) -> Report | None:
        """Take what `slower` has found in a comparison; return what is to be told, once and again only when it changes."""
        self._rows.append({(each.rank, each.part): each for each in found if each.by >= SLOW})
        if len(self._rows) < IN_A_ROW:
            return None
        lasting = [self._usual(key) for key in set.intersection(*(set(row) for row in self._rows))]
        if any((each.node, each.part) == self._told for each in lasting):
            return None
        if lasting:
            worst = max(lasting, key=lambda each: each.by)
            self._told = worst.node, worst.part
            return Report(worst, _message(worst, [each.rank for each in lasting if (each.node, each.part) == self._told]))
        if self._told and not any((each.node, each.part) == self._told for row in self._rows for each in row.values()):
            node, self._told = self._told[0], None
            return Report(None, f"{node} keeps up with the others again")
        return None

    def _usual(self, key: tuple[int, str]) -> Slowest:
        """Return the median of what a rank has been."""
        return sorted((row[key] for row in self._rows), key=lambda each: each.by)[len(self._rows) // 2]


def _message(worst: Slowest, ranks: Sequence[int]) -> str:
    who = f"rank {worst.rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
    return f"{who} on {worst.node}: the others wait, a step takes {worst.by:.0%} longer, since {_WORDS[worst.part]}"
