"""Straggler detection: which rank the other ranks wait for, and when to report it.

Only ranks with the same layers are compared, since pipeline stages have different work. A rank's slowdown is the fraction by which a step
is longer than it would be if that rank worked as fast as the median rank. A false alarm is worse than a missed straggler, so a rank is
reported only if it is slow in consecutive comparisons over at least 2 min. This module does no I/O and no communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

from swarmtrain.trainer.health.rank_timing import RankTiming

SLOWDOWN_THRESHOLD = 0.2
"""Minimum slowdown to report: the fraction by which a step is longer than it would be without the slowest rank."""
CONSECUTIVE_COMPARISONS = 12
"""Number of consecutive comparisons in which a straggler must be slow."""
_PASS_TO_FORWARD_RATIO = 3
"""Time of a forward and backward pass relative to the forward pass alone: the backward pass takes twice as long."""
_CAUSE_BY_PHASE = {"data": "data loading is slower there", "compute": "computation is slower there"}


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the median rank, in one comparison of all ranks."""

    rank: int
    node: str
    slowdown: float
    """Fraction by which a step takes longer because of this rank."""
    phase: str
    """Phase that causes the larger part of the delay: "data" or "compute"."""


@dataclass(frozen=True)
class StragglerReport:
    """Report of a new straggler, or that the node reported last is no longer a straggler (`straggler` is then None)."""

    straggler: Straggler | None
    message: str


def find_slow_ranks(timings: Sequence[RankTiming]) -> list[Straggler]:
    """Return the ranks that other ranks wait for, by decreasing slowdown, without a minimum slowdown."""
    working = [timing for timing in timings if timing.micro_batch_count]
    if not working:
        return []
    median_data_seconds, median_step_seconds = (
        median_low(timing.data_seconds for timing in working),
        median_low(timing.step_seconds for timing in working),
    )
    max_micro_batches = max(timing.micro_batch_count for timing in working)
    block_seconds_by_stage = {
        stage: median_low(timing.block_seconds for timing in working if timing.stage == stage)
        for stage in {timing.stage for timing in working}
    }
    slow_ranks = []
    for rank, timing in enumerate(timings):
        median_block_seconds = block_seconds_by_stage.get(timing.stage, 0.0)
        excess_seconds = {
            "data": timing.micro_batch_count * (timing.data_seconds - median_data_seconds),
            "compute": _PASS_TO_FORWARD_RATIO
            * timing.micro_batch_count
            * timing.block_count
            * (timing.block_seconds - median_block_seconds),
        }
        phase = max(excess_seconds, key=excess_seconds.__getitem__)
        # A rank with fewer micro batches than the others may take longer for each without making others wait.
        expected_seconds = max_micro_batches * (median_data_seconds + _PASS_TO_FORWARD_RATIO * timing.block_count * median_block_seconds)
        extra_seconds = min(
            excess_seconds[phase],
            timing.micro_batch_count * (timing.data_seconds + _PASS_TO_FORWARD_RATIO * timing.block_count * timing.block_seconds)
            - expected_seconds,
            median_step_seconds,
        )
        if extra_seconds > 0:
            slow_ranks.append(
                Straggler(rank, timing.node, extra_seconds / max(median_step_seconds - extra_seconds, expected_seconds), phase)
            )
    return sorted(slow_ranks, key=lambda each: -each.slowdown)


class StragglerDetector:
    """Detects stragglers that persist over several comparisons."""

    def __init__(self) -> None:
        self._comparisons: deque[dict[tuple[int, str], Straggler]] = deque(maxlen=CONSECUTIVE_COMPARISONS)
        self._reported: tuple[str, str] | None = None

    def add_comparison(self, slow_ranks: Sequence[Straggler]) -> StragglerReport | None:
        """Add the `slow_ranks` of one comparison. Return a report if the straggler has changed since the last report, else None."""
        self._comparisons.append({(each.rank, each.phase): each for each in slow_ranks if each.slowdown >= SLOWDOWN_THRESHOLD})
        if len(self._comparisons) < CONSECUTIVE_COMPARISONS:
            return None
        persistent = [self._find_median_straggler(key) for key in set.intersection(*(set(comparison) for comparison in self._comparisons))]
        if any((each.node, each.phase) == self._reported for each in persistent):
            return None
        if persistent:
            worst = max(persistent, key=lambda each: each.slowdown)
            self._reported = worst.node, worst.phase
            return StragglerReport(
                worst, _format_straggler_message(worst, [each.rank for each in persistent if (each.node, each.phase) == self._reported])
            )
        if self._reported and not any(
            (each.node, each.phase) == self._reported for comparison in self._comparisons for each in comparison.values()
        ):
            node, self._reported = self._reported[0], None
            return StragglerReport(None, f"{node} is no longer a straggler")
        return None

    def _find_median_straggler(self, rank_and_phase: tuple[int, str]) -> Straggler:
        """Return the entry for `rank_and_phase` of the comparison in which its slowdown is the median over all comparisons."""
        return sorted((comparison[rank_and_phase] for comparison in self._comparisons), key=lambda each: each.slowdown)[
            len(self._comparisons) // 2
        ]


def _format_straggler_message(worst_straggler: Straggler, ranks: Sequence[int]) -> str:
    ranks_text = f"rank {worst_straggler.rank}" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
    cause = _CAUSE_BY_PHASE[worst_straggler.phase]
    return f"{ranks_text} on {worst_straggler.node}: other ranks wait, a step takes {worst_straggler.slowdown:.0%} longer, since {cause}"
