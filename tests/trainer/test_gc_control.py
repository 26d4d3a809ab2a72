"""Garbage is collected only at the scheduled steps, and as usual afterwards."""

from __future__ import annotations

import gc
import weakref

from swarmtrain.trainer.instrumentation import GcController


class _ReferenceCycle:
    def __init__(self) -> None:
        self.reference = self


def test_garbage_waits_for_a_step_that_all_ranks_share() -> None:
    with GcController() as collector:
        kept = _ReferenceCycle()
        for number in (61, 62):
            collector.collect_garbage_if_due(number)
        assert gc.get_freeze_count() > 0
        dropped = weakref.ref(_ReferenceCycle())
        lists = [[number] for number in range(5_000)]  # enough to trigger an automatic collection
        collector.collect_garbage_if_due(99)
        assert dropped() is not None
        assert len(lists) == 5_000
        collector.collect_garbage_if_due(100)
        assert dropped() is None
        assert kept.reference is kept
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
