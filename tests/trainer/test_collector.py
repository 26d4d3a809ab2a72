"""Garbage is collected at the steps that are for it, and as ever afterwards."""

from __future__ import annotations

import gc
import weakref

from swarmtrain.trainer.collector import Collector


class _Ring:
    def __init__(self) -> None:
        self.itself = self


def test_garbage_waits_for_a_step_that_all_ranks_share() -> None:
    with Collector() as collector:
        kept = _Ring()
        for number in (61, 62):
            collector.after_step(number)
        assert gc.get_freeze_count() > 0
        dropped = weakref.ref(_Ring())
        lists = [[number] for number in range(5_000)]  # enough for the collector to start by itself
        collector.after_step(99)
        assert dropped() is not None
        assert len(lists) == 5_000
        collector.after_step(100)
        assert dropped() is None
        assert kept.itself is kept
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
