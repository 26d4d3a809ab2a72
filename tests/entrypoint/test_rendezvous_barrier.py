"""When a rendezvous round begins, depending on which nodes arrive when."""

from __future__ import annotations

import pytest

from swarmtrain.entrypoint.coordinator.membership import BARRIER_TIMEOUT_SECONDS, COORDINATOR_WARMUP_SECONDS, RendezvousBarrier


class FakeClock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def barrier(clock: FakeClock) -> RendezvousBarrier:
    barrier = RendezvousBarrier(clock)
    clock.time += COORDINATOR_WARMUP_SECONDS + 0.1
    return barrier


def test_who_has_announced_itself_is_waited_for(barrier: RendezvousBarrier, clock: FakeClock) -> None:
    for name in ("node0", "node1"):
        barrier.expect_node(name)
    assert not barrier.register_arrival("b-1", "node0", {"node0"})
    clock.time += 5
    assert barrier.register_arrival("b-1", "node1", {"node0", "node1"})
    assert barrier.register_arrival("b-1", "node0", {"node0", "node1"})


def test_who_was_in_the_last_round_and_lives_is_waited_for_a_while(barrier: RendezvousBarrier, clock: FakeClock) -> None:
    assert not barrier.register_arrival("b-2", "node0", {"node0", "node1"})
    clock.time += BARRIER_TIMEOUT_SECONDS - 1
    assert not barrier.register_arrival("b-2", "node0", {"node0", "node1"})
    clock.time += 2
    assert barrier.register_arrival("b-2", "node0", {"node0", "node1"})


def test_a_node_that_is_dead_or_has_exited_is_not_waited_for(barrier: RendezvousBarrier) -> None:
    barrier.expect_node("node1")
    barrier.forget_node("node1")
    assert barrier.register_arrival("b-1", "node0", {"node0"})


def test_who_has_come_once_and_is_not_to_come_again_is_not_waited_for(barrier: RendezvousBarrier) -> None:
    """For example, a quarantined node."""
    barrier.expect_node("node1")
    barrier.register_arrival("b-1", "node1", {"node0", "node1"})
    assert barrier.register_arrival("b-2", "node0", {"node0"})


def test_an_announcement_expires(barrier: RendezvousBarrier, clock: FakeClock) -> None:
    barrier.expect_node("node1")
    clock.time += BARRIER_TIMEOUT_SECONDS + 1
    assert barrier.register_arrival("b-1", "node0", {"node0"})


def test_a_round_that_has_begun_takes_who_comes_late(barrier: RendezvousBarrier) -> None:
    assert barrier.register_arrival("b-1", "node0", {"node0"})
    barrier.expect_node("node1")
    assert barrier.register_arrival("b-1", "node1", {"node0", "node1"})


def test_a_new_coordinator_has_not_heard_from_all_nodes(clock: FakeClock) -> None:
    gathering = RendezvousBarrier(clock)
    assert not gathering.register_arrival("b-1", "node0", {"node0"})
    clock.time += COORDINATOR_WARMUP_SECONDS + 0.1
    assert gathering.register_arrival("b-1", "node0", {"node0"})
