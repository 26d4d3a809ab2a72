"""Just-in-time checkpoints of a failed world: which ranks save which step. Pure rules, and an arbiter with a fake clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from coordinator_thread import serve_coordinator

from swarmtrain.entrypoint.coordinator.rescue import (
    RESCUE_DECISION_TIMEOUT_SECONDS,
    RESCUE_SETTLE_SECONDS,
    SURVIVOR_LOST_SECONDS,
    RescueArbiter,
    choose_checkpoint_writers,
)
from swarmtrain.protocol import Event, RescueAssignment, SurvivorState
from swarmtrain.protocol.coordinator_client import CoordinatorClient


def build_survivor(step: int, *, ready: bool = False, part: int = 0, parts: int = 1, disk: int = 0, disks: int = 1) -> SurvivorState:
    return SurvivorState(step, ready, part, parts, 4, disk, disks)


@pytest.mark.parametrize(
    ("states", "timed_out", "step", "writers"),
    [
        ({2: build_survivor(7)}, False, 7, (2,)),
        ({2: build_survivor(7, ready=True)}, False, 0, ()),  # another rank may have done step 8
        ({2: build_survivor(7, ready=True)}, True, 7, (2,)),
        ({1: build_survivor(7, ready=True), 2: build_survivor(8)}, False, 8, (2,)),
        ({1: build_survivor(6, ready=True), 3: build_survivor(7), 2: build_survivor(7)}, False, 7, (2,)),
        ({0: build_survivor(7, part=0, parts=2)}, True, 0, ()),
        ({0: build_survivor(7, part=0, parts=2), 3: build_survivor(7, part=1, parts=2)}, False, 7, (0, 3)),
        # Only some ranks have completed step 8: a rank that is ready completes it too.
        ({0: build_survivor(8, part=0, parts=2), 3: build_survivor(7, ready=True, part=1, parts=2)}, True, 8, (0, 3)),
        # A rank without the gradients of step 8 cannot; and a rank that has done step 8 no longer has step 7.
        ({0: build_survivor(8, part=0, parts=2), 3: build_survivor(7, part=1, parts=2)}, True, 0, ()),
        (
            {0: build_survivor(8, part=0, parts=2), 2: build_survivor(7, part=0, parts=2), 3: build_survivor(7, part=1, parts=2)},
            True,
            7,
            (2, 3),
        ),
        ({0: build_survivor(0)}, True, 0, ()),  # no step is done yet
        # With node-local disks, every node that holds the complete state saves it; halves on two disks are not complete.
        ({1: build_survivor(7, disk=0), 2: build_survivor(7, disk=1), 3: build_survivor(7, disk=1)}, True, 7, (1, 2)),
        ({1: build_survivor(6, disk=0), 2: build_survivor(7, disk=1)}, True, 7, (2,)),
        ({0: build_survivor(7, part=0, parts=2), 3: build_survivor(7, part=1, parts=2, disk=1)}, True, 0, ()),
        (
            {0: build_survivor(7, part=0, parts=2), 1: build_survivor(7, part=1, parts=2), 3: build_survivor(7, part=1, parts=2, disk=1)},
            True,
            7,
            (0, 1),
        ),
    ],
)
def test_the_newest_complete_step_is_saved_once(
    states: dict[int, SurvivorState], *, timed_out: bool, step: int, writers: tuple[int, ...]
) -> None:
    assert choose_checkpoint_writers(states, are_reports_complete=timed_out) == (step, writers)


def test_a_writer_that_falls_silent_is_replaced_until_nobody_is_left() -> None:
    clock = [100.0]
    arbiter = RescueArbiter(lambda: clock[0])
    assert not arbiter.is_rescue_pending
    assert arbiter.record_surviving_rank("world", 1, build_survivor(7)) == RescueAssignment(7, (1,), 1)
    assert arbiter.record_surviving_rank("world", 2, build_survivor(7)).writers == (1,)
    assert arbiter.is_rescue_pending
    clock[0] += SURVIVOR_LOST_SECONDS + 0.1
    assert arbiter.record_surviving_rank("world", 2, build_survivor(7)) == RescueAssignment(7, (2,), 2)
    arbiter.record_rescue_finished("world", 1, 1)  # the first one was merely slow: its report no longer counts
    assert arbiter.is_rescue_pending
    arbiter.record_rescue_finished("world", 2, 2)
    assert not arbiter.is_rescue_pending
    assert arbiter.record_surviving_rank("world", 1, build_survivor(7)).is_finished


def test_nodes_with_disks_of_their_own_all_save() -> None:
    clock = [100.0]
    arbiter = RescueArbiter(lambda: clock[0])
    first, second = build_survivor(7, disk=0, disks=2), build_survivor(7, disk=1, disks=2)
    assert not arbiter.record_surviving_rank("world", 1, first).writers, "the other node may be about to speak"
    assert not arbiter.record_surviving_rank("world", 2, second).writers
    clock[0] += RESCUE_SETTLE_SECONDS + 0.1
    assert arbiter.record_surviving_rank("world", 1, first) == RescueAssignment(7, (1, 2), 1)
    arbiter.record_rescue_finished("world", 1, 1)
    assert arbiter.is_rescue_pending, "it stands on one disk"
    arbiter.record_dead_rank(Event("failure", {"world": "world", "rank": 2}))
    assert arbiter.record_surviving_rank("world", 1, first) == RescueAssignment(7, (1,), 2)
    arbiter.record_rescue_finished("world", 2, 1)
    assert not arbiter.is_rescue_pending


def test_no_rank_waits_forever() -> None:
    clock = [100.0]
    arbiter = RescueArbiter(lambda: clock[0])
    half = build_survivor(7, part=1, parts=2)
    assert not arbiter.record_surviving_rank("world", 3, half).is_finished
    clock[0] += RESCUE_DECISION_TIMEOUT_SECONDS + 0.1
    assert arbiter.record_surviving_rank("world", 3, half) == RescueAssignment(attempt=0, is_finished=True)
    arbiter.record_surviving_rank("another", 3, half)
    assert arbiter.is_rescue_pending
    clock[0] += SURVIVOR_LOST_SECONDS + 0.1
    assert not arbiter.is_rescue_pending, "they have died"


def test_the_dead_are_not_waited_for() -> None:
    arbiter = RescueArbiter(lambda: 0.0)
    for rank in (0, 1):
        arbiter.record_dead_rank(Event("failure", {"world": "world", "rank": rank, "signal": "SIGKILL"}))
    assert not arbiter.record_surviving_rank("world", 2, build_survivor(7, ready=True)).writers
    assert arbiter.record_surviving_rank("world", 3, build_survivor(7, ready=True)) == RescueAssignment(7, (2,), 1)
    arbiter.record_dead_rank(Event("failure", {"world": "world", "rank": 2}))
    assert arbiter.record_surviving_rank("world", 3, build_survivor(7, ready=True)) == RescueAssignment(7, (3,), 2)


def test_if_all_have_reported_there_is_no_wait() -> None:
    arbiter = RescueArbiter(lambda: 0.0)
    for rank in range(3):
        assert not arbiter.record_surviving_rank("world", rank, build_survivor(7, ready=True)).writers
    assert arbiter.record_surviving_rank("world", 3, build_survivor(7, ready=True)) == RescueAssignment(7, (0,), 1)


def test_no_two_worlds_have_the_same_generation() -> None:
    """Generations of a world whose nodes are all gone are on disks that no rank can read."""
    arbiter = RescueArbiter(lambda: 0.0)
    assert [arbiter.issue_generation(above) for above in (0, 0, 5, 3)] == [1, 2, 6, 7]


def test_a_timeout_assigns_writers_without_a_further_report() -> None:
    clock = [100.0]
    arbiter = RescueArbiter(lambda: clock[0])
    arbiter.process_timeouts()
    for rank in (1, 2):
        assert not arbiter.record_surviving_rank("world", rank, build_survivor(7, disk=rank - 1, disks=2)).writers
    clock[0] += RESCUE_SETTLE_SECONDS + 0.1
    arbiter.process_timeouts()
    assert arbiter.assignments == {"world": RescueAssignment(7, (1, 2), 1)}
    clock[0] += SURVIVOR_LOST_SECONDS + 0.1
    arbiter.process_timeouts()  # nobody is left
    assert arbiter.assignments == {"world": RescueAssignment(7, (1, 2), 1)}


def test_a_lost_writer_is_replaced_without_a_further_report() -> None:
    clock = [100.0]
    arbiter = RescueArbiter(lambda: clock[0])
    arbiter.record_surviving_rank("world", 1, build_survivor(7))
    clock[0] += 3.0
    arbiter.record_surviving_rank("world", 2, build_survivor(7))
    clock[0] += SURVIVOR_LOST_SECONDS - 1.0
    arbiter.process_timeouts()
    assert arbiter.assignments["world"] == RescueAssignment(7, (2,), 2)


def test_the_report_of_a_rank_waits_for_an_assignment_for_at_most_2_s() -> None:
    with serve_coordinator() as served, ThreadPoolExecutor() as pool:

        def report(rank: int, part: int) -> tuple[RescueAssignment, float]:
            started_at = time.monotonic()
            state = build_survivor(7, part=part, parts=2)
            return CoordinatorClient(served.address).report_surviving_rank("world", rank, state), time.monotonic() - started_at

        first = pool.submit(report, 1, 0)
        time.sleep(0.5)
        assert not first.done()
        assert report(3, 1)[0] == first.result()[0] == RescueAssignment(7, (1, 3), 1)
        assert first.result()[1] < 1.9
        rescue, seconds = report(0, 0)  # does not write
        assert rescue.writers == (1, 3)
        assert seconds > 1.5
        writer, seconds = report(1, 0)
        assert writer.writers == (1, 3)
        assert seconds < 1.0
