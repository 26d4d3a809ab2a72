"""Assignment of micro batches by measured speed: how many micro batches of a global batch each replica processes.

A step takes as long as the slowest replica computes, so a slower replica is assigned fewer micro batches. The size of a micro batch, the
samples of a global batch and the sum of the losses do not depend on the assignment. All ranks compute the assignment from the same
timings, so that they agree without further communication. This module does no I/O and no communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import median_low

from swarmtrain.config.schema.topology import TopologyConfig
from swarmtrain.trainer.health.rank_timing import RankTiming

MIN_MICRO_BATCHES = 1
"""Minimum number of micro batches of a replica: the speed of a replica without any could not be measured."""


class MicroBatchReassigner:
    """Decides after which steps micro batches are reassigned, and how; see TopologyConfig.reassigns_micro_batches."""

    def __init__(self, topology: TopologyConfig) -> None:
        self._topology = topology
        self._last_step: int | None = None
        """Step after which micro batches were reassigned last."""

    def reassign(self, timings: Sequence[RankTiming] | None, counts: tuple[int, ...], step: int) -> tuple[int, ...]:
        """Return the number of micro batches of each replica in the steps after `step`: `counts`, unless it pays to change them.

        `timings`: timings of all ranks; None if no comparison was due. `counts`: number of micro batches of each replica until now.
        """
        if timings is None or not self._topology.reassigns_micro_batches(len(counts)):
            return counts
        if self._last_step is not None and step - self._last_step < self._topology.micro_batch_reassignment_interval:
            return counts
        seconds = estimate_micro_batch_seconds(timings, len(counts))
        if seconds is None:
            return counts
        new_counts = reassign_by_speed(seconds, counts, self._topology.micro_batch_reassignment_threshold)
        if new_counts != counts:
            self._last_step = step
        return new_counts


def reassign_by_speed(seconds: Sequence[float], counts: tuple[int, ...], threshold: float) -> tuple[int, ...]:
    """Return the best numbers of micro batches if they shorten a step by at least the fraction `threshold`, otherwise `counts`.

    `seconds`: duration of one micro batch on each replica. `counts`: number of micro batches of each replica until now. With a threshold
    of at least 1 - 0.95 / 1.05, measurements that deviate by up to 5 % do not change an assignment that is the best one.
    """
    best = assign_by_speed(seconds, sum(counts))
    current_seconds, best_seconds = (_compute_step_seconds(seconds, each) for each in (counts, best))
    return best if best_seconds < current_seconds and best_seconds <= (1 - threshold) * current_seconds else counts


def assign_by_speed(seconds: Sequence[float], total: int) -> tuple[int, ...]:
    """Return the number of micro batches of each replica for which a step takes the least time; their sum is `total`.

    `seconds`: duration of one micro batch on each replica. Each replica gets at least one; `total` must suffice for this. Each further
    micro batch goes to the replica that would complete it first, or to the first of several. This gives the shortest step, since micro
    batches are equal: a replica that would complete one later is never chosen in its place.
    """
    counts = [MIN_MICRO_BATCHES] * len(seconds)
    completion_times = [((MIN_MICRO_BATCHES + 1) * each, replica) for replica, each in enumerate(seconds)]
    heapq.heapify(completion_times)
    for _ in range(total - sum(counts)):
        replica = completion_times[0][1]
        counts[replica] += 1
        heapq.heapreplace(completion_times, ((counts[replica] + 1) * seconds[replica], replica))
    return tuple(counts)


def estimate_micro_batch_seconds(timings: Sequence[RankTiming], replica_count: int) -> list[float] | None:
    """Return the duration in seconds of one micro batch on each replica: loading, forward and backward pass, without waiting for replicas.

    A replica is as slow as its slowest rank. For a replica with a single micro batch, only the forward pass has been measured; its backward
    pass is assumed to be as much longer as on the median rank of the others. Return None if a replica has not been measured.
    """
    ratios = [each.micro_batch_seconds / each.forward_seconds for each in timings if each.micro_batch_seconds and each.forward_seconds]
    ratio = median_low(ratios) if ratios else 1.0
    seconds = [0.0] * replica_count
    for timing in timings:
        if not timing.forward_seconds:
            return None
        pass_seconds = timing.micro_batch_seconds or ratio * timing.forward_seconds
        seconds[timing.replica] = max(seconds[timing.replica], timing.data_seconds + pass_seconds)
    return seconds if all(seconds) else None


def _compute_step_seconds(seconds: Sequence[float], counts: Sequence[int]) -> float:
    return max(each * count for each, count in zip(seconds, counts, strict=True))
